"""Counts the steps of a training, whatever it is written with.

In this order: steps of an optimizer of torch, batches of a feed, reports, or the reductions of the
tensor that is reduced most often.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from horovod_runner.worker.profiling.clock import clock


class OuterSteps:
    """Tells the steps that user code calls from those that another step contains.

    Horovod's optimizer calls the step of the optimizer that it wraps: that is one step. Both may be
    the same object.

    The end of a step that raised is not seen. It is over when its optimizer begins another step, or
    another optimizer its second one.
    """

    def __init__(self) -> None:
        self._outer: weakref.ref[Any] | None = None
        self._inner: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, optimizer: Any) -> bool:
        """Record that a step begins; returns whether it is an outer one."""
        outer = None if self._outer is None else self._outer()
        if outer is not None and outer is not optimizer and optimizer not in self._inner:
            self._inner.add(optimizer)
            return False
        self._inner.clear()
        self._outer = weakref.ref(optimizer)
        return True

    def end(self, optimizer: Any) -> bool:
        """Record that a step ends; returns whether it was an outer one."""
        if self._outer is None or self._outer() is not optimizer:
            return False
        self._inner.clear()
        self._outer = None
        return True


class OptimizerSteps:
    """Counts the steps of torch's optimizers.

    Several optimizers take turns (as in a GAN): the one that has made the most steps counts.

    Attributes:
        count: how many steps there were, also of optimizers that no longer exist.
    """

    def __init__(self) -> None:
        self.count = 0
        self._outer_steps = OuterSteps()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def watch(self, module: Any) -> None:
        """Count from now on; called with ``torch.optim.optimizer`` when that is imported.

        Later would be wrong: torch goes through these functions at each step, and they must not
        change meanwhile.
        """
        module.register_optimizer_step_pre_hook(self._enter)
        module.register_optimizer_step_post_hook(self._leave)

    def _enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._outer_steps.begin(optimizer)

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._outer_steps.end(optimizer):
            return
        steps = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.count = max(self.count, steps)
        clock.end_step()


optimizer_steps: Final = OptimizerSteps()
