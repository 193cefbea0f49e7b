"""What ``main`` may call while it runs as a rank: `log_to_driver`.

Imports what it needs here, not at the first call: that may come from a thread while another one
forks, and a fork inside an import never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod_runner import messages, pipe
from horovod_runner.frames import frame


_data: tuple[bytes, Mapping[str, Sequence[bytes]]] = b"", {}


def data() -> tuple[bytes, Mapping[str, Sequence[bytes]]]:
    """The pickled readers of this run's datasets, and what messages.Assignment says of pieces."""
    return _data


def set_data(pickled: bytes, pieces: Mapping[str, Sequence[bytes]]) -> None:
    """Say what :func:`data` gives."""
    global _data
    _data = pickled, pieces


def log_to_driver(message: str) -> None:
    """Show a line on the driver, whatever ``driver_log_verbosity`` is.

    Comes from HorovodRunner's ``sparkdl.horovod.log_to_driver``; texts of any length arrive whole.
    Outside a worker (the function called directly, in a test say) it prints.

    Args:
        message: the text; anything else is turned into one by ``str``.
    """
    text = str(message)
    way_out = pipe.current()
    if way_out is None:
        print(text)
    else:
        way_out.send(frame(messages.encode(messages.Log(way_out.rank, text))))
