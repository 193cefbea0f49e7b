"""What ``main`` may call while it runs as a rank: `log_to_driver`.

Imports what it needs here, not at the first call: that may come from a thread while another one
forks, and a fork inside an import never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod_runner import messages, pipe
from horovod_runner.frames import frame


@dataclass
class Data:
    """What a rank is told of its datasets.

    Attributes:
        readers: the pickled readers, by the name of the argument.
        pieces: as in messages.Assignment.
    """

    readers: bytes = b""
    pieces: Mapping[str, Sequence[bytes]] = field(default_factory=dict)


data = Data()


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
