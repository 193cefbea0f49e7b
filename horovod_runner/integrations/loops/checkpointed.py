"""checkpointed and epochs: a loop that is saved, and continues where it was, in two lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from horovod_runner.common.numbers import plain_int
from horovod_runner.integrations.loops import parts
from horovod_runner.worker.api import check_weights, load_checkpoint, save_checkpoint

_begun: list[Checkpointed] = []  # what the next loop over epochs continues


class Checkpointed:
    """What a training keeps in its checkpoints, and its position; made by :func:`checkpointed`.

    Attributes:
        epoch: the epoch to go on with; 0 at the beginning.
        step: the steps that are done.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.epoch = self.step = 0
        self._objects = {name: each for name, each in objects.items() if _has_state(each)}
        for name, value in objects.items():
            if name not in self._objects:
                if hasattr(self, name):
                    raise ValueError(f"checkpointed cannot keep a value as {name!r}: rename it")
                setattr(self, name, value)
        self._values = [name for name in objects if name not in self._objects]
        self._load()

    def _load(self) -> None:
        loaded = load_checkpoint()
        if loaded is None:
            return
        state = loaded.state
        if not isinstance(state, Mapping) or "objects" not in state:
            raise TypeError(
                "the checkpoint was not written by checkpointed or epochs: load it with "
                "load_checkpoint, or begin in another checkpoint_dir"
            )
        if set(state["objects"]) != set(self._objects) or set(state["values"]) != set(self._values):
            there, here = [*state["objects"], *state["values"]], [*self._objects, *self._values]
            raise ValueError(
                f"the checkpoint keeps {', '.join(there)}, and this training {', '.join(here)}: "
                "keep the same, or begin in another checkpoint_dir"
            )
        for name, each in self._objects.items():
            _set_state(each, state["objects"][name])
        for name in self._values:
            setattr(self, name, state["values"][name])
        self.epoch, self.step = int(state["epoch"]), loaded.step

    def save(self, *, epoch: int | None = None, step: int | None = None, **metrics: Any) -> None:
        """Save a checkpoint, on every rank.

        Args:
            epoch: the epoch to go on with. None: where the feed among the objects is; without one
                the epoch that this continues.
            step: the steps that are done. None: as the feed says; without one, one more than
                before.
            metrics: numbers by name, by which ``CheckpointConfig(metric=...)`` finds the best.

        Raises:
            TypeError: a value cannot be stored, or a number is none.
        """
        position = self._position()
        self.epoch = plain_int("epoch", position[0] if epoch is None else epoch)
        self.step = plain_int("step", position[1] if step is None else step)
        state = {
            "objects": {name: _state_of(each) for name, each in self._objects.items()},
            "values": {name: getattr(self, name) for name in self._values},
            "epoch": self.epoch,
        }
        save_checkpoint(state, self.step, {**metrics, "epoch": self.epoch})

    def _position(self) -> tuple[int, int]:
        for each in self._objects.values():
            if parts.role_of(each) == "batches":
                state = each.state_dict()
                if "step" in state:
                    return state["epoch"], state["epoch"] * len(each) + state["step"]
        return self.epoch, self.step + 1


def checkpointed(**objects: Any) -> Checkpointed:
    """Keep objects in the run's checkpoints, and load the latest one into them now.

    For example::

        kept = checkpointed(model=model, optimizer=optimizer, batches=batches, best=0.0)
        for epoch in epochs(5):
            for x, y in batches:
                ...
            kept.best = max(kept.best, accuracy)
            kept.save(accuracy=accuracy)

    Call it on every rank, after ``prepare``. With ``HorovodRunner(resume=True)`` and after a
    restart the objects then have the state of the latest checkpoint, and a feed of a Shard
    continues with the batch after it, with any number of ranks.

    Args:
        objects: by name: what has ``state_dict`` and ``load_state_dict`` (models, optimizers,
            schedules, scalers, feeds), Keras models and optimizers; and plain values, which become
            attributes of the result.

    Raises:
        TypeError: the latest checkpoint was not written by ``checkpointed``.
        ValueError: it keeps other objects, or a name is taken.
    """
    kept = Checkpointed(objects)
    _begun[:] = [kept]
    return kept


def epochs(count: int, *, resume: bool = False) -> Iterator[int]:
    """Count epochs, from the one that the training continues with.

        for epoch in epochs(5, resume=True):
            for x, y in batches:
                ...

    With ``DebugConfig(weight_check="epoch")`` the ranks' weights are compared after each epoch.

    Args:
        count: how many epochs the training has, with those before it was interrupted.
        resume: keep all that was given to :func:`prepare` in checkpoints: save one after each
            epoch, and begin with the state of the latest one, if the run resumes.

    Yields:
        The number of the epoch, from 0 on.

    Raises:
        RuntimeError: ``resume=True``, and nothing was prepared.
        ValueError: ``count`` is below 0.
    """
    if plain_int("count", count) < 0:
        raise ValueError(f"count must be 0 or more epochs, not {count}")
    ours, parts.prepared[:] = list(parts.prepared), []
    kept = _begun.pop() if _begun else None
    if resume and kept is not None:
        raise RuntimeError(
            "checkpointed saves and loads already: leave resume=True out, and call its save()"
        )
    if resume and not ours:
        raise RuntimeError(
            "epochs(..., resume=True) keeps what was prepared, and nothing was: call "
            "model, optimizer, batches = prepare(model, optimizer, batches) before"
        )
    if resume:
        kept = Checkpointed(
            {f"{number} {parts.role_of(each)}": each for number, each in enumerate(ours)}
        )
    models = [each for each in ours if parts.role_of(each) == "model"]
    return _count(count, kept, models, saves=resume)


def _count(
    count: int, kept: Checkpointed | None, models: list[Any], *, saves: bool
) -> Iterator[int]:
    for epoch in range(0 if kept is None else kept.epoch, count):
        yield epoch
        for model in models:
            check_weights(model, epoch + 1)
        if saves and kept is not None:
            kept.save(epoch=epoch + 1)


def _is_keras(each: Any) -> bool:
    return "keras" in parts.homes_of(each) and hasattr(each, "variables")


def _has_state(each: Any) -> bool:
    return _is_keras(each) or (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))


def _state_of(each: Any) -> Any:
    if not _is_keras(each):
        return each.state_dict()
    from keras import ops

    return [ops.convert_to_numpy(variable) for variable in _variables(each)]


def _set_state(each: Any, state: Any) -> None:
    if not _is_keras(each):
        each.load_state_dict(state)
        return
    for variable, value in zip(_variables(each), state, strict=True):
        variable.assign(value)


def _variables(each: Any) -> list[Any]:
    """The variables of a Keras model with those of its optimizer, or of an optimizer."""
    optimizer = getattr(each, "optimizer", None)
    own = list(each.variables)
    return own if optimizer is None else own + list(optimizer.variables)
