"""Compares the ranks' weights and learning rates: at first, at growing intervals, and at the end.

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

from horovod_runner.worker import context
from horovod_runner.worker.checks import notes
from horovod_runner.worker.imports.patches import instead_of
from horovod_runner.worker.profiling.steps import OuterSteps
from horovod_runner.worker.weights import is_part

_STEPS = 20  # then after twice as many steps, and so on
_OPTIMIZERS = 4
_WEIGHTS = 256
_SAMPLES = 1024  # values of a weight
_DIGEST_BYTES = 4
_VERSIONS = 4  # of weights, to see whether they have changed
_watching: list[_TorchSteps] = []
_parallel: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of all ranks


class _Watched:
    """The weights of an optimizer, for the comparison after its last step."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.steps = 0
        self._named, self._name, self._groups = _weights_of(optimizer)
        self._when = "at the end" if number == 1 else f"at the end of optimizer {number}"
        self._sets = _process_set(optimizer)
        self._some = self._named[:: -(-len(self._named) // _VERSIONS) or 1]
        self._latest: list[tuple[int, int]] = []

    def count(self) -> None:
        """Note a step, and what the weights are like after it."""
        self.steps += 1
        self._latest = self._versions()

    def end(self) -> None:
        """Send the weights, unless they changed after the last step: perhaps on this rank alone."""
        if self._latest and self._latest == self._versions():
            joined = ", after hvd.join()" if any(each.joined for each in _watching) else ""
            when = self._when + joined
            _send(when + self._sets, self._name, _rates(self._groups), self._named)

    def _versions(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for _, weight in self._some]


class _TorchSteps:
    """Hooks for the steps of all optimizers of PyTorch."""

    def __init__(self, module: Any) -> None:
        self.joined = False
        # Not by id: that of an optimizer that was freed is given to another one, and ranks free
        # theirs at different times.
        self._trainings: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._ends: list[weakref.finalize[..., Any]] = []  # also of what no longer exists
        self._outer_steps = OuterSteps()
        self._ended = False
        module.register_optimizer_step_pre_hook(self.before)
        module.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Any, _args: Any, _options: Any) -> None:
        if self._ended or not self._outer_steps.begin(optimizer):
            return
        if optimizer in self._trainings or len(self._ends) == _OPTIMIZERS:
            return
        rank = context.current()
        if rank is None or rank.size == 1 or not rank.start_check or _differs(optimizer):
            # The hooks stay: another thread may be in a step, and torch iterates over them there.
            self._ended = True
        else:
            training = _Watched(optimizer, len(self._ends) + 1)
            self._trainings[optimizer] = training
            # It often ends before main does, and its weights with it.
            self._ends.append(weakref.finalize(optimizer, training.end))
            self._ends[-1].atexit = False
            _send_torch("before the first step", optimizer)

    def after(self, optimizer: Any, _args: Any, _options: Any) -> None:
        if self._ended or not self._outer_steps.end(optimizer):
            return
        training = self._trainings.get(optimizer)
        if training is None:
            return
        training.count()
        if _is_due(training.steps):
            _send_torch(f"after step {training.steps}", optimizer)

    def finish(self) -> None:
        """Compare the weights of the optimizers that still exist."""
        for end in self._ends:
            end()


def finish() -> None:
    """Compare the weights at the end of ``main``."""
    for steps in _watching:
        steps.finish()


def watch_torch(module: Any) -> None:
    """Watch optimizers; called with the module ``torch.optim.optimizer``."""
    _watching.append(_TorchSteps(module))


def watch_join(module: Any) -> None:
    """Note that ranks have missed steps of others; called with ``horovod.torch.mpi_ops``."""

    @instead_of(module, "join")
    def join(plain: Any, *args: Any, **options: Any) -> Any:
        last = plain(*args, **options)
        for steps in _watching:
            steps.joined = True
        return last


def watch_data_parallel(module: Any) -> None:
    """Note the weights that all ranks share; called with ``torch.nn.parallel.distributed``."""

    @instead_of(module.DistributedDataParallel, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        import torch.distributed as dist

        plain(self, *args, **options)
        if self.process_group is not None and self.process_group.size() == dist.get_world_size():
            _parallel.add(self)


def _parallel_names(optimizer: Any) -> dict[int, str]:
    """The names of an optimizer's weights, by id, if DistributedDataParallel keeps them alike."""
    names = {
        id(weight): name.removeprefix("module.")
        for parallel in list(_parallel)
        if parallel.require_backward_grad_sync and not _averages_weights(parallel)
        for name, weight in parallel.named_parameters()
        if name.removeprefix("module.") not in parallel.parameters_to_ignore
    }
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return names if weights and all(id(weight) in names for weight in weights) else {}


def _averages_weights(parallel: Any) -> bool:
    """Whether weights are averaged from time to time, and differ in between."""
    return any("localSGD" in hook.__name__ for hook, _ in getattr(parallel, "_comm_hooks", ()))


def _is_due(steps: int) -> bool:
    """Whether to compare the ranks: after steps 1, 20, 40, 80, ..."""
    # With a warm-up the first one may change nothing.
    return steps == 1 or (steps % _STEPS == 0 and (steps // _STEPS).bit_count() == 1)


def _differs(optimizer: Any) -> bool:
    """Whether the ranks may have different weights on purpose."""
    process_set = getattr(optimizer, "process_set", None)
    if process_set is not None and not process_set.included():
        return True
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(map(is_part, parameters)) or "deepspeed" in sys.modules:
        return True
    distributed, horovod = sys.modules.get("torch.distributed"), sys.modules.get("horovod.torch")
    others = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if not others or (horovod is not None and horovod.is_initialized()):
        return False
    return not _parallel_names(optimizer)


def _send_torch(when: str, optimizer: Any) -> None:
    named, name, groups = _weights_of(optimizer)
    _send(when + _process_set(optimizer), name, _rates(groups), named)


def _weights_of(optimizer: Any) -> tuple[list[tuple[str, Any]], str, list[Any]]:
    """The weights that ranks share, with their names; the optimizer's name; and its groups."""
    names = getattr(optimizer, "_parameter_names", {})
    parallel = _parallel_names(optimizer)
    named = []
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        name = names.get(parameter) or parallel.get(id(parameter))
        named.append((name or f"parameter {number} of shape {tuple(parameter.shape)}", parameter))
    distributed = "Distributed " if hasattr(optimizer, "_allreduce_delay") else ""
    if parallel:  # torch's own class averages
        distributed = "DistributedDataParallel's "
    return named, distributed + type(optimizer).__name__, optimizer.param_groups


def _rates(groups: Iterable[Any]) -> list[Any]:
    return [group.get("lr") for group in groups]


def _process_set(optimizer: Any) -> str:
    """Words for the ranks that share the weights, unless these are all."""
    number = getattr(getattr(optimizer, "process_set", None), "process_set_id", 0)
    return f" in process set {number}" if number else ""


def _send(
    when: str, optimizer: str, rates: Iterable[Any], named: Iterable[tuple[str, Any]]
) -> None:
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
        if _fills_its_memory(tensor):  # without a copy, in whatever order its values lie there
            values = tensor.as_strided((count,), (step,))
        else:
            values = tensor.reshape(-1)[::step][:count]
        values = values.cpu().contiguous()
        data = values.view(torch.uint8).numpy()
    else:
        data = value.numpy().ravel()[:_SAMPLES].tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _fills_its_memory(tensor: Any) -> bool:
    """Whether no other tensor's values lie between its own."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return bool(last + 1 == tensor.numel())


def watch_keras(module: Any) -> None:
    """Watch ``fit``; called with the module of Keras's CallbackList."""

    @instead_of(module.CallbackList, "on_train_begin")
    def on_train_begin(plain: Any, self: Any, logs: Any = None) -> None:
        plain(self, logs)
        rank = context.current()
        if rank is not None and rank.size > 1 and rank.start_check:
            _watch_fit(self)


def _watch_fit(callbacks: Any) -> None:
    """Look at the weights now, after the first batch, after epochs 1, 2, 4, ..., and at the end."""
    model = callbacks.model
    if model.built:
        _send_keras("before the first step", model)

    @instead_of(callbacks, "on_train_batch_end")
    def on_train_batch_end(plain: Any, batch: Any, logs: Any = None) -> None:
        del callbacks.on_train_batch_end
        plain(batch, logs)
        _send_keras("after step 1", model)

    @instead_of(callbacks, "on_epoch_end")
    def on_epoch_end(plain: Any, epoch: int, logs: Any = None) -> None:
        plain(epoch, logs)
        if (epoch + 1).bit_count() == 1:
            _send_keras(f"after epoch {epoch + 1}", model)

    @instead_of(callbacks, "on_train_end")
    def on_train_end(plain: Any, logs: Any = None) -> None:
        _send_keras("at the end of fit", model)  # before callbacks restore other weights
        plain(logs)


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
