"""Programs that tests start beside themselves."""

from __future__ import annotations

import subprocess
from types import TracebackType


class Program(subprocess.Popen[str]):
    """A child process that does not outlive a test that fails or takes too long.

    At the end of its block a Popen waits for the child, whatever ended the block: one that never
    ends keeps the test for ever. This one is killed first where the block raised.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, traceback)
