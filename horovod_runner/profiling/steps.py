"""Counts the steps of a training, whatever it is written with.

In this order: steps of an optimizer of torch, batches of a feed, reports, or the reductions of the
tensor that is reduced most often.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class OptimizerSteps:
    """Counts the steps of torch's optimizers, once torch is imported.

    Horovod's optimizer calls the step of the optimizer that it wraps: that is one step.

    Several optimizers take turns (as in a GAN): the one that has made the most steps counts.

    Args:
        after: called after each step, in the thread that made it; must not raise.
    """

    def __init__(self, after: Callable[[], None] | None = None) -> None:
        self._after = after
        self._depth = 0
        self._counts: dict[int, int] = {}
        self._is_watching = False

    @property
    def count(self) -> int:
        """How many steps there were."""
        return max(self._counts.values(), default=0)

    def watch(self) -> None:
        """Begin to count, if torch's optimizers are imported by now; may be called at any time."""
        if self._is_watching:
            return
        module = sys.modules.get("torch.optim.optimizer")
        if not hasattr(module, "register_optimizer_step_post_hook"):
            return
        self._is_watching = True
        module.register_optimizer_step_pre_hook(self._enter)  # type: ignore[union-attr]
        module.register_optimizer_step_post_hook(self._leave)  # type: ignore[union-attr]

    def _enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0  # a step that raised has not left
            key = id(optimizer)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._after is not None:
                self._after()
