"""A training of a Keras 3 model, on its TensorFlow and torch backends.

Keras is imported by the methods: a rank reads this file before its backend is chosen.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.keras import (
    KerasKind,
    arranged,
    input_names,
    read_model,
    readable,
)
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.integrations.training.training import Trained, Training

if TYPE_CHECKING:
    from horovod_runner.data.shard import Shard


@dataclass(frozen=True, kw_only=True)
class KerasTraining(Training):
    """A training of a Keras model.

    Attributes:
        model: the model; on its way to the ranks the content of a file of KerasKind.
        optimizer: an optimizer or its name, None for the model's own; on the way its config.
        loss: as for ``model.compile``; None for the model's own.
        metrics: as for ``model.compile``.
        custom_objects: classes and functions of the model, by the name that Keras saves.
        backend: Keras's backend, on the way to the ranks.
    """

    framework: ClassVar[Framework] = "tensorflow"
    library: ClassVar[str] = "horovod_runner.integrations.keras"

    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    backend: str = ""

    def check(self, first: Mapping[str, Any]) -> None:
        """See Training, as for the methods below."""
        import keras

        model = self.model
        if not isinstance(model, keras.Model):
            raise TypeError(f"model must be a Keras model, not {type(model).__name__}")
        parts = {name: first[name] for name in self.features}
        shapes = ", ".join(
            f"{name} {('rows', *value.shape[1:])}" if hasattr(value, "shape") else f"{name} (rows,)"
            for name, value in parts.items()
        ).replace("'", "")
        try:
            outputs = _outputs(model, parts)
        except Exception as error:  # whatever Keras or the user's layers raise
            raise ValueError(
                f"model does not fit the columns: {type(error).__name__}: {error}, on a batch of "
                f"{shapes}. Change {self.names.features} or dtypes, or the model"
            ) from error
        self.check_outputs(len(keras.tree.flatten(outputs)))
        if type(model).train_step is not keras.Model.train_step:
            self._check_train_step(first)

    def _check_train_step(self, first: Mapping[str, Any]) -> None:
        """Try the user's train_step on the first rows, with the weights 0 and 1."""
        import numpy as np

        inputs, labels, _ = self.split_parts([*readable(first).values()])
        if not labels:
            return
        x = arranged(inputs, input_names(self.model))
        y = labels[0] if len(labels) == 1 else labels
        after = []
        try:
            for weight in (0.0, 1.0):
                model = _read(self._written())
                loss = model.loss if self.loss is None else self.loss
                model.compile("sgd", loss=loss, loss_weights=self.loss_weights, run_eagerly=True)
                model.train_on_batch(x, y, np.full(len(labels[0]), weight, "float32"))
                after.append(model.get_weights())
        except Exception as error:  # whatever the user's step raises, perhaps on the driver alone
            if "too many values to unpack" in str(error):
                raise ValueError(
                    f"train_step of {type(self.model).__name__} takes no weights of rows. The rows "
                    "that fill up a batch have the weight 0. Write x, y, weight = data, and "
                    "self.compute_loss(x, y, y_pred, weight)"
                ) from error
            return
        if all(np.array_equal(*pair) for pair in zip(*after, strict=True)):
            warnings.warn(
                f"train_step of {type(self.model).__name__} does not use the weights of rows, the "
                "third part of data. So it trains with the rows that fill up a batch, too, and the "
                "result may depend on the number of ranks. Use "
                "self.compute_loss(x, y, y_pred, weight)",
                stacklevel=2,
            )

    def for_ranks(self) -> Self:
        """With model and optimizer in Keras's own formats."""
        import keras

        # A model that is not compiled has no attribute optimizer.
        optimizer = self.optimizer or getattr(self.model, "optimizer", None)
        if isinstance(optimizer, str):
            optimizer = keras.optimizers.get(optimizer)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"optimizer must be an optimizer of Keras or its name, not {optimizer!r}; a model "
                "that is compiled needs none"
            )
        loss = self.model.loss if self.loss is None else self.loss
        if loss is None and not self._may_have_own_loss():
            raise ValueError(
                "there is no loss to train with: set loss, such as loss='mse', or compile the "
                "model with one"
            )
        return replace(
            self,
            model=self._sendable(),
            optimizer=keras.saving.serialize_keras_object(optimizer),
            loss=loss,
            custom_objects={},
            backend=keras.backend.backend(),
        )

    def _may_have_own_loss(self) -> bool:
        """Whether the model, or a layer, may have a loss that is not an argument of compile."""
        import keras

        model = self.model
        methods = ("train_step", "compute_loss")
        if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in methods):
            return True
        layers = model._flatten_layers()
        are_kerass = all(type(layer).__module__.startswith("keras.") for layer in layers)
        return bool(model.losses) or not are_kerass  # the user's layers may call add_loss

    def _sendable(self) -> bytes:
        """The content of the model's file, which the ranks can read, or ValueError."""
        if input_names(self.model):
            return self._written()
        try:
            data = self._written()
            _read(data)
        except Exception as error:  # of Keras, or of the user's class
            kind = type(self.model).__name__
            first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
            raise ValueError(
                f"the model cannot be sent to the ranks, because Keras cannot recreate {kind} from "
                f"its config: {type(error).__name__}: {first}. Give {kind} a method "
                "get_config that returns the arguments of its __init__, or make a model of "
                "keras.Model(inputs, outputs)"
            ) from error
        return data

    def _written(self) -> bytes:
        """The content of the model's file."""
        with temporary_folder("keras") as folder:
            path = Path(folder) / "model"
            KerasKind.of(self.custom_objects).write(self.model, path, ())
            return path.read_bytes()

    def read_model(self) -> Any:
        """The untrained model, on a rank."""
        return _read(self.model)

    def use_backend(self) -> None:
        """Choose Keras's backend on a rank, before Keras is imported."""
        os.environ.setdefault("KERAS_BACKEND", self.backend)

    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """Run ``model.fit``."""
        self.use_backend()
        from horovod_runner.integrations.training import keras_loop

        return keras_loop.train(self, train, valid)

    def trained_model(self, trained: Trained) -> Any:
        """A copy of the model, with what its layers for text have learned."""
        network = _read(self._written())
        network.set_weights(trained.weights)
        return network


def set_seed(seed: int) -> None:
    """Seed what Keras draws from: Python's random numbers, NumPy's and those of its backend.

    ``keras.utils.set_random_seed`` imports TensorFlow wherever it is installed (Keras 3.15,
    utils/rng_utils.py), which costs a rank on torch 3 s of a core.
    """
    import keras

    if keras.backend.backend() != "torch":
        keras.utils.set_random_seed(seed)
        return
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _read(data: bytes) -> Any:
    with temporary_folder("keras") as folder:
        path = Path(folder) / "model"
        path.write_bytes(data)
        return read_model(path)


def _outputs(model: Any, parts: Mapping[str, Any]) -> Any:
    """The outputs of a model for a few rows.

    A model that begins with its inputs is built, and computes nothing here. Another one gets the
    rows, which builds it: its weights travel to the ranks, and a file needs their shapes.
    """
    import keras

    names = input_names(model)
    has_lists = any(isinstance(value, list) for value in parts.values())
    if not names or has_lists:
        return model(arranged(readable(parts), names))
    specs = {
        name: keras.KerasTensor((None, *value.shape[1:]), str(value.dtype))
        for name, value in parts.items()
    }
    return model.compute_output_spec(arranged(specs, names))
