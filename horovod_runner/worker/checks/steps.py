"""Compares the ranks' weights and learning rates: at the first steps, and at growing intervals.

Different weights before the first step mean that nothing was broadcast, and different ones after it
that gradients are not averaged. Later differences come from learning rates of one rank, and from
weights that Horovod does not know of. These trainings run without an error, and learn less.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from horovod_runner.profiling.steps import OuterSteps
from horovod_runner.worker import context
from horovod_runner.worker.checks import notes

_STEPS = 20  # then after twice as many steps, and so on
_OPTIMIZERS = 4
_WEIGHTS = 256
_SAMPLES = 1024  # values of a weight
_DIGEST_BYTES = 4
_SHARDED = ("DTensor", "FlatParameter")


class _TorchSteps:
    """Hooks for the steps of all optimizers of PyTorch.

    Args:
        module: ``torch.optim.optimizer``.
    """

    def __init__(self, module: Any) -> None:
        # Not by id: that of an optimizer that was freed is given to another one, and ranks free
        # theirs at different times.
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._seen = 0  # optimizers, also those that no longer exist
        self._outer_steps = OuterSteps()
        self._ended = False
        module.register_optimizer_step_pre_hook(self.before)
        module.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Any, _args: Any, _options: Any) -> None:
        if self._ended or not self._outer_steps.begin(optimizer):
            return
        if optimizer in self._steps or self._seen == _OPTIMIZERS:
            return
        rank = context.current()
        if rank is None or rank.size == 1 or not rank.start_check or _differs(optimizer):
            # The hooks stay: another thread may be in a step, and torch iterates over them there.
            self._ended = True
        else:
            self._steps[optimizer] = 0
            self._seen += 1
            _send_torch("before the first step", optimizer)

    def after(self, optimizer: Any, _args: Any, _options: Any) -> None:
        if self._ended or not self._outer_steps.end(optimizer) or optimizer not in self._steps:
            return
        self._steps[optimizer] += 1
        steps = self._steps[optimizer]
        if _is_due(steps):
            _send_torch(f"after step {steps}", optimizer)


def watch_torch(module: Any) -> None:
    """Watch optimizers; called with the module ``torch.optim.optimizer``."""
    _TorchSteps(module)


def _is_due(steps: int) -> bool:
    """Whether to compare the ranks: after steps 1, 20, 40, 80, ..."""
    # With a warm-up the first one may change nothing.
    return steps == 1 or (steps % _STEPS == 0 and _is_power_of_two(steps // _STEPS))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _differs(optimizer: Any) -> bool:
    """Whether the ranks may have different weights on purpose."""
    if getattr(getattr(optimizer, "process_set", None), "process_set_id", 0):
        return True
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(type(parameter).__name__ in _SHARDED for parameter in parameters):
        return True
    distributed, horovod = sys.modules.get("torch.distributed"), sys.modules.get("horovod.torch")
    others = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return "deepspeed" in sys.modules or (
        bool(others) and not (horovod is not None and horovod.is_initialized())
    )


def _send_torch(when: str, optimizer: Any) -> None:
    names = getattr(optimizer, "_parameter_names", {})
    averaged = getattr(optimizer, "_requires_update", None)
    named = []
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        if averaged is not None and parameter.requires_grad and parameter not in averaged:
            continue  # the checks of gradients say so
        name = names.get(parameter) or f"parameter {number} of shape {tuple(parameter.shape)}"
        named.append((name, parameter))
    distributed = "Distributed " if hasattr(optimizer, "_allreduce_delay") else ""
    rates = [group.get("lr") for group in optimizer.param_groups]
    _send(when, distributed + type(optimizer).__name__, rates, named)


def _send(
    when: str, optimizer: str, rates: Iterable[Any], named: Iterable[tuple[str, Any]]
) -> None:
    """Send a note.

    Args:
        when: the note's key.
        optimizer: a name.
        rates: the learning rates of its groups of weights.
        named: its weights.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing():
        return
    weights = list(named)
    weights = weights[:: -(-len(weights) // _WEIGHTS) or 1]
    try:
        lines = [f"{name} {_digest(value)}" for name, value in weights]
        shown = ", ".join(f"{float(rate):.6g}" for rate in rates if rate is not None)
    except Exception:  # a tensor of an unusual kind
        return
    notes.send("weights", when, "\n".join([f"{optimizer}\t{shown}", *lines]))


def _digest(value: Any) -> str:
    """A digest of some values of a tensor, spread over it."""
    if hasattr(value, "detach"):
        import torch

        tensor = value.detach()
        count = min(tensor.numel(), _SAMPLES)
        step = max(1, tensor.numel() // _SAMPLES)
        # Without a copy of the tensor, in whatever order its values lie in memory.
        values = tensor.as_strided((count,), (step,)).cpu().contiguous()
        data = values.view(torch.uint8).numpy()
    else:
        data = value.numpy().ravel()[:_SAMPLES].tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def watch_keras(module: Any) -> None:
    """Watch ``fit``; called with the module of Keras's CallbackList."""
    plain = module.CallbackList.on_train_begin

    def on_train_begin(self: Any, logs: Any = None) -> None:
        plain(self, logs)
        rank = context.current()
        if rank is not None and rank.size > 1 and rank.start_check:
            _watch_fit(self)

    module.CallbackList.on_train_begin = on_train_begin


def _watch_fit(callbacks: Any) -> None:
    """Look at the weights now, after the first batch, and after epochs 1, 2, 4, 8, ..."""
    model = callbacks.model
    if model.built:
        _send_keras("before the first step", model)
    plain = callbacks.on_train_batch_end

    def on_train_batch_end(batch: Any, logs: Any = None) -> None:
        del callbacks.on_train_batch_end
        plain(batch, logs)
        _send_keras("after step 1", model)

    callbacks.on_train_batch_end = on_train_batch_end
    plain_end = callbacks.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        plain_end(epoch, logs)
        if _is_power_of_two(epoch + 1):
            _send_keras(f"after epoch {epoch + 1}", model)

    callbacks.on_epoch_end = on_epoch_end


def _send_keras(when: str, model: Any) -> None:
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    is_distributed = any(kind.__name__ == "Distributed" for kind in type(inner).__mro__)
    weights = model.trainable_variables
    if hasattr(inner, "shared_variables"):  # others differ on purpose
        weights = inner.shared_variables(weights)
    named = [(weight.path, weight.value) for weight in weights]
    # Without an optimizer, the model has a train_step of the user's.
    name = "train_step" if inner is None else type(inner).__name__
    name = f"Distributed {name}" if is_distributed else name
    _send(when, name, [getattr(inner, "learning_rate", None)], named)
