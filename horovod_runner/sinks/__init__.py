"""Where what comes back from the ranks is shown."""

from __future__ import annotations

from typing import Literal, Protocol


class Sink(Protocol):
    """Takes what comes back from the ranks; called in the thread that called ``run``."""

    def output(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> None:
        """A piece of what a rank printed."""

    def log(self, rank: int, text: str) -> None:
        """What ``log_to_driver`` was called with."""

    def notice(self, text: str) -> None:
        """Something that the runner itself has to say."""
