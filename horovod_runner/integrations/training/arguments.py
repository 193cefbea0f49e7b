"""The arguments of `fit`: what they mean, and whether they fit each other and the network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from horovod_runner.common.options import ALIASES as OF_RUNNERS
from horovod_runner.data.feed.fields import flat_names
from horovod_runner.integrations.training.network import Kind
from horovod_runner.integrations.training.training import Precision

_GREATER_IS_BETTER: Final = ("acc", "auc", "f1", "precision", "recall", "r2")

_OWN = "a Lightning module has its own"

_OF_TRAINER = "it is for Lightning's Trainer"

_EXAMPLES: Final = {
    "x": "x='image', the column of the network's input",
    "y": "y='label', the column of the labels",
    "loss": "loss=torch.nn.CrossEntropyLoss()",
    "optimizer": "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)",
}

_AT_LEAST_1: Final = ("global_batch", "epochs", "accumulate", "save_every", "patience")

ALIASES: Final = {
    **OF_RUNNERS,
    **dict.fromkeys(("features", "feature_cols", "inputs", "X", "featuresCol"), "x"),
    **dict.fromkeys(("labels", "label_cols", "target", "targets", "labelCol"), "y"),
    **dict.fromkeys(("batch_size", "batch"), "global_batch"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("np", "num_proc", "num_workers", "world_size", "size", "n"), "ranks"),
    **dict.fromkeys(("val", "validation_data", "validation_split", "valid"), "validation"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip"), "clip_norm"),
    **dict.fromkeys(("accumulation", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("early_stopping", "early_stopping_rounds"), "patience"),
    **dict.fromkeys(("sample_weight", "weights", "weight_col", "weightCol"), "weight"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("amp", "mixed_precision", "fp16", "bf16"), "precision"),
}


_NEEDS: Final[Mapping[Kind, Sequence[str]]] = {
    "torch": ("x", "y", "loss", "optimizer"),
    "keras": ("x", "y"),
    "lightning": (),
}

_REFUSES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "torch": {"trainer_options": _OF_TRAINER},
    "keras": {
        "step": "it replaces the step of a torch module; override train_step of the model",
        "save_every": "Keras models are saved at the ends of epochs",
        "trainer_options": _OF_TRAINER,
    },
    "lightning": {
        "loss": f"{_OWN}, in training_step",
        "optimizer": f"{_OWN}, in configure_optimizers",
        "schedule": f"{_OWN}, in configure_optimizers",
        "warmup": f"{_OWN}, in configure_optimizers",
        "metrics": f"{_OWN}: log them with self.log",
        "step": f"{_OWN}, training_step",
        "weight": "name the column in x, and use it in training_step",
    },
}


def features_of(x: Any) -> dict[str, str | list[str]]:
    """The inputs of the network, by name.

    Raises:
        TypeError: ``x`` names no columns.
    """
    if x is None:
        return {}
    named: dict[str, str | list[str]] = {}
    if isinstance(x, str):
        named = {x: x}
    elif isinstance(x, Mapping):
        named = {name: c if isinstance(c, str) else list(c) for name, c in x.items()}
    elif isinstance(x, Sequence):
        named = {"+".join(map(str, x)): list(x)}
    flat = flat_names(named.values())
    if not flat or not all(isinstance(name, str) for name in flat):
        raise TypeError(
            "x must name columns: 'image'; or ['age', 'income'] for columns side by side; or "
            f"{{'first': 'image', 'second': ['age', 'income']}} for several inputs; not {x!r}"
        )
    return named


def labels_of(y: Any) -> list[str]:
    """The columns of the labels.

    Raises:
        TypeError: ``y`` names no columns.
    """
    if y is None:
        return []
    names = list(y) if isinstance(y, Sequence) and not isinstance(y, str) else [y]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"y must name the column of the labels, or a list of columns, not {y!r}")
    return names


def watched(
    kind: Kind, monitor: str | None, metrics: Any, has_validation: bool
) -> tuple[str, Literal["min", "max"]]:
    """The metric that tells the best epoch, and whether it is low or high there.

    Raises:
        ValueError: there is no such metric.
    """
    name = monitor or ("val_loss" if has_validation else "loss")
    if kind == "torch":
        known = ["loss", *metrics]
        known += [f"val_{each}" for each in known] if has_validation else []
        if name not in known:
            raise ValueError(f"monitor={name!r}, and the metrics are {', '.join(known)}")
    return name, "max" if any(mark in name.lower() for mark in _GREATER_IS_BETTER) else "min"


def check_fitting(
    kind: Kind, given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """Check that no argument is missing, and that each is for this kind of model.

    Raises:
        TypeError: ``loss`` is no function.
        ValueError: an argument is missing, or is not for the model.
    """
    called = f"a {kind.capitalize()} model"
    for name in _NEEDS[kind]:
        if given[name] is None and not (name == "loss" and given["step"] is not None):
            raise ValueError(f"fit requires {name} for {called}: {_EXAMPLES[name]}")
    for name, why in _REFUSES[kind].items():
        if given[name] != parameters[name].default:
            raise ValueError(f"{name} is not for {called}: {why}")
    if kind == "torch" and given["step"] is None:
        for loss in given["loss"] if isinstance(given["loss"], list | tuple) else [given["loss"]]:
            if not callable(loss) or isinstance(loss, type):
                raise TypeError(f"loss must be a function: {_EXAMPLES['loss']}; not {loss!r}")
    if kind == "keras" and given["precision"] != "float32" and given["network"] is given["model"]:
        raise ValueError(
            f"precision={given['precision']!r}: the layers of a Keras model get their precision "
            "when they are made, so give a function that makes the model"
        )
    if given["resume"] and given["checkpoint_dir"] is None:
        raise ValueError(
            "resume=True continues from the latest checkpoint in checkpoint_dir: name the folder"
        )
    if (given["x"] is None) != (given["y"] is None):
        raise ValueError("give x and y, or neither: a Lightning module then gets all columns")


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if an argument has the wrong type or is out of range."""
    for name in (*_AT_LEAST_1, "warmup", "seed"):
        value = given[name]
        if value is None and name in ("save_every", "patience"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {value!r}")
        if value < (name in _AT_LEAST_1):
            raise ValueError(f"{name} must be {int(name in _AT_LEAST_1)} or more, not {value}")
    if given["global_batch"] % given["accumulate"]:
        raise ValueError(
            f"accumulate={given['accumulate']} does not divide global_batch="
            f"{given['global_batch']} into equal parts: change one of them"
        )
    if given["precision"] not in get_args(Precision):
        raise ValueError(
            f"precision must be 'float32', 'bfloat16' or 'float16', not {given['precision']!r}"
        )
    clip = given["clip_norm"]
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float)):
        raise TypeError(f"clip_norm must be a number, not {clip!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip_norm must be above 0, not {clip}")
    if given["monitor"] is not None and not isinstance(given["monitor"], str):
        raise TypeError(f"monitor must be the name of a metric, not {given['monitor']!r}")
