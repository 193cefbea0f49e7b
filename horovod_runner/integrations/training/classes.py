"""What the outputs of a network mean, by its loss: classes with probabilities, or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_runner.data.scoring.outputs import as_numpy


def loss_name(loss: Any) -> str:
    """The name of a loss; of the first of several. It says whether the loss takes logits.

    A subclass of a loss of classes has the name of that loss.
    """
    if isinstance(loss, list | tuple):
        loss = loss[0]
    if isinstance(loss, dict):
        loss = next(iter(loss.values()))
    if isinstance(loss, str):
        return loss
    if isinstance(loss, partial):
        loss = loss.func
    names = [base.__name__ for base in type(loss).__mro__]
    known = [name for name in names if is_class_loss(name)]
    name = str(getattr(loss, "__name__", (known or names[:1])[-1]))
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return f"{name} with logits" if config.get("from_logits") else name


def is_class_loss(name: str) -> bool:
    """Whether a loss, by its name, compares scores of classes with a class."""
    plain = name.lower().replace("_", "")
    if plain.startswith(("poisson", "gaussian")):  # their NLLLoss is one of numbers
        return False
    return any(part in plain for part in ("crossentropy", "nllloss", "bcewithlogits", "bceloss"))


@dataclass(frozen=True)
class Classes:
    """Turns the scores of classes into a class and probabilities; pickled with the model."""

    loss_name: str  # says whether scores are logits, log-probabilities or probabilities
    dtype: str = "float64"  # of the numbers of classes

    def __call__(self, result: Any) -> tuple[Any, Any]:
        """The class of each row, shape (rows,), and its probabilities, shape (rows, classes)."""
        values = result[0] if isinstance(result, tuple | list) else result
        scores = np.asarray(as_numpy(values), np.float64)
        has_logits = "logits" in self.loss_name.lower()
        if scores.ndim == 1 or scores.shape[1] == 1:  # one score: of the second of two classes
            ones = scores.reshape(len(scores))
            if has_logits:
                ones = 1 / (1 + np.exp(-ones))
            probabilities = np.stack([1 - ones, ones], axis=1)
        elif self.loss_name in ("NLLLoss", "nll_loss"):
            probabilities = np.exp(scores)
        elif has_logits and self.loss_name.lower().startswith(("bce", "binary")):
            probabilities = 1 / (1 + np.exp(-scores))
        elif not has_logits and self.loss_name not in ("CrossEntropyLoss", "cross_entropy"):
            probabilities = scores
        else:  # torch's CrossEntropyLoss takes logits, too
            shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
            probabilities = shifted / shifted.sum(axis=1, keepdims=True)
        return probabilities.argmax(axis=1).astype(self.dtype), probabilities
