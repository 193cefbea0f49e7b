"""A checkpoint becomes a model: the user's function builds the network, which gets the weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.text import names_text
from horovod_runner.errors import CheckpointError


def restore(checkpoint: Checkpoint, build: Callable[[], Any] | None) -> Any:
    """The model of a checkpoint, whose network ``build`` returns unless it is a Keras model.

    Its state is a Keras model, a state dict of torch, a list of Keras weights, or a dict that holds
    one of these.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no weights of that network.
        TypeError: ``build`` is needed and missing, or returns no model.
    """
    state = checkpoint.load()
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(state, keras.Model):
        return state
    if build is None:
        raise TypeError(
            f"{checkpoint!r} holds weights, not a model: pass the function that builds the "
            "network, build=Net"
        )
    model = build()
    if hasattr(model, "load_state_dict"):
        _load_torch(model, state, checkpoint)
    elif hasattr(model, "set_weights"):
        _load_keras(model, state, checkpoint)
    else:
        raise TypeError(
            f"build must return a torch module or a Keras model, not {type(model).__name__}"
        )
    return model


def _load_torch(model: Any, state: Any, checkpoint: Checkpoint) -> None:
    wanted = model.state_dict()
    tried = ""
    for place, candidate in _candidates(state):
        if not isinstance(candidate, Mapping) or not candidate:
            continue
        weights = {str(name).removeprefix("module."): value for name, value in candidate.items()}
        if weights.keys() != wanted.keys():
            if weights.keys() & wanted.keys():
                found = [
                    ("lacks", sorted(wanted.keys() - weights.keys())),
                    ("has also", sorted(weights.keys() - wanted.keys())),
                ]
                parts = [f"{verb} {names_text('weight', names)}" for verb, names in found if names]
                tried = f" {place} {' and '.join(parts)}."
            continue
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights in {place} of {checkpoint!r} do not fit the network that build "
                f"returned: {error}"
            ) from error
        return
    raise CheckpointError(
        f"{checkpoint!r} holds no weights of {type(model).__name__}, which build returned: looked "
        f"in {', '.join(place for place, _ in _candidates(state))}.{tried} Save its state_dict(), "
        "or build the network that was saved"
    )


def _load_keras(model: Any, state: Any, checkpoint: Checkpoint) -> None:
    shapes = [tuple(weight.shape) for weight in model.get_weights()]
    for _, candidate in _candidates(state):
        if (
            isinstance(candidate, list | tuple)
            and [tuple(getattr(weight, "shape", (None,))) for weight in candidate] == shapes
        ):
            model.set_weights(list(candidate))
            return
    raise CheckpointError(
        f"{checkpoint!r} holds no list of weights of the shapes {shapes[:3]}..., as the model has "
        "that build returned: save the model itself, or model.get_weights()"
    )


def _candidates(state: Any) -> Iterator[tuple[str, Any]]:
    """Where weights may be in a state, with words for the place."""
    yield "the state itself", state
    if isinstance(state, Mapping):
        for name, value in state.items():
            if isinstance(value, Mapping | list | tuple):
                yield f"state[{name!r}]", value
