"""Counts the steps of a training, whatever it is written with.

In this order: steps of an optimizer of torch, batches of a feed, reports, or the reductions of the
tensor that is reduced most often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final


class OptimizerSteps:
    """Counts the steps of torch's optimizers.

    Horovod's optimizer calls the step of the optimizer that it wraps: that is one step.

    Several optimizers take turns (as in a GAN): the one that has made the most steps counts.

    Attributes:
        after: called after each step, in the thread that made it; must not raise.
    """

    def __init__(self) -> None:
        self.after: Callable[[], None] | None = None
        self._depth = 0
        self._counts: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many steps there were."""
        return max(self._counts.values(), default=0)

    def watch(self, module: Any) -> None:
        """Count from now on.

        Call it when the module is imported: torch goes through these functions at each step, and
        they must not change meanwhile.

        Args:
            module: ``torch.optim.optimizer``.
        """
        module.register_optimizer_step_pre_hook(self._enter)
        module.register_optimizer_step_post_hook(self._leave)

    def _enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0  # a step that raised has not left
            key = id(optimizer)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self.after is not None:
                self.after()


optimizer_steps: Final = OptimizerSteps()
