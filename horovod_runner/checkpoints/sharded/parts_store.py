"""Tells rank 0 which parts of a checkpoint are written.

The parts are written in threads while the training continues, where no collective may be called.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import TCPStore

from horovod_runner.wire.collectives import SmallCollectives

_FIRST_SECONDS, _LONGEST_SECONDS = 0.001, 0.1


class PartsStore:
    """A server on rank 0, and a connection of each rank. All ranks make it at the same time.

    They have to connect within ``patience`` seconds.
    """

    def __init__(self, rank: int, ranks: SmallCollectives, patience: float) -> None:
        host = os.environ["MASTER_ADDR"]  # of rank 0, in the network of the run
        options = {"timeout": timedelta(seconds=patience), "wait_for_workers": False}
        if rank == 0:
            self._store = TCPStore(host, 0, is_master=True, **options)
            ranks.broadcast(self._store.port.to_bytes(2, "little"), 2)
        else:
            port = int.from_bytes(ranks.broadcast(b"", 2), "little")
            self._store = TCPStore(host, port, is_master=False, **options)

    def tell(self, number: int, rank: int, data: bytes) -> None:
        """Send what a rank has written of a checkpoint."""
        self._store.set(f"{number}/{rank}", data)

    def hear(self, number: int, rank: int) -> bytes:
        """Wait for what a rank has written of a checkpoint."""
        key, wait = f"{number}/{rank}", _FIRST_SECONDS
        while not self._store.check([key]):
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_SECONDS)
        data: bytes = self._store.get(key)
        self._store.delete_key(key)
        return data
