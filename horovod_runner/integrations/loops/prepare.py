"""prepare: makes models, optimizers and batches ready for one rank of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from horovod_runner.integrations.loops import parts
from horovod_runner.integrations.loops.parts import Role, role_of

_ORDER: Final[Sequence[Role]] = ("model", "optimizer", "schedule", "scaler", "batches")


def prepare(*objects: Any, **options: Any) -> Any:
    """Make the parts of a training loop ready for this rank, in ``main``.

        model, optimizer, batches = prepare(model, optimizer, batches)

    It starts Horovod, and does for each part what ranks need:

    - a model moves to this rank's GPU, or stays on the CPU; all ranks begin with the weights of
      rank 0;
    - an optimizer averages the gradients of all ranks, and begins with rank 0's state;
    - a ``DataLoader`` of torch gives this rank's part of each batch, on the rank's GPU: the parts
      are of ``batch_size`` rows each. Feeds of a Shard have this rank's part already.
    - learning rate schedules and gradient scalers stay as they are: give them, too, and
      :func:`epochs` and :func:`checkpointed` keep their state.

    Several models and optimizers may be given, in one call or in several. Outside a run it
    prepares a training in one process.

    Args:
        objects: torch: modules, optimizers, schedules, a GradScaler, feeds and DataLoaders. Keras:
            models that are built, compiled or not, and optimizers.
        options: for each optimizer, as for Horovod's ``DistributedOptimizer``: ``compression``,
            ``backward_passes_per_step`` and others.

    Returns:
        The prepared object, or a tuple of several, in the order of the arguments.

    Raises:
        TypeError: an object is something else.
        ValueError: an optimizer has weights of no given model; a Keras model has no weights yet; or
            a DataLoader draws its rows in a way that cannot be divided.
    """
    if not objects:
        raise TypeError("prepare takes the parts of a training: prepare(model, optimizer, batches)")
    roles = [role_of(each) for each in objects]
    unknown = [type(each).__name__ for each, role in zip(objects, roles, strict=True) if not role]
    if unknown:
        raise TypeError(
            f"prepare takes models, optimizers, schedules, scalers, feeds and DataLoaders, not "
            f"{', '.join(unknown)}. A dataset becomes a feed by data.to_torch(...)"
        )
    if any("keras" in parts.homes_of(each) for each in objects):
        from horovod_runner.integrations.loops import keras_parts as framework
    else:
        from horovod_runner.integrations.loops import torch_parts as framework  # type: ignore[no-redef]
    framework.start()
    models = [each for each, role in zip(objects, roles, strict=True) if role == "model"]
    prepared = list(objects)
    for role in _ORDER:
        for place, each in enumerate(objects):
            if roles[place] == role and role in framework.PREPARE:
                prepared[place] = framework.PREPARE[role](each, models, options)
    parts.prepared.extend(prepared)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)
