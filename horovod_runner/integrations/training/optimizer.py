"""The optimizer of PyTorch that a training asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def make_optimizer(model: torch.nn.Module, optimizer: Any, learning_rate: float | None) -> Any:
    """The optimizer of a model.

    Raises:
        TypeError: it is neither an optimizer nor a function that returns one.
        ValueError: it holds the parameters of another model, in several groups.
    """
    made = optimizer
    if not isinstance(made, torch.optim.Optimizer):
        made = optimizer(model.parameters()) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer must be an optimizer of torch, or a function from the model's parameters to "
            f"one, lambda parameters: torch.optim.SGD(parameters, lr=0.1), not {optimizer!r}"
        )
    of_model = {id(parameter) for parameter in model.parameters()}
    of_optimizer = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if not of_optimizer <= of_model:
        if len(made.param_groups) > 1:
            raise ValueError(
                "optimizer holds the parameters of another model than model, in "
                f"{len(made.param_groups)} groups: pass a function from the model's parameters to "
                "an optimizer instead"
            )
        settings = {name: v for name, v in made.param_groups[0].items() if name in made.defaults}
        made = type(made)(model.parameters(), **settings)
    if learning_rate is not None:
        for group in made.param_groups:
            group["lr"] = learning_rate
    return made


def scale(groups: Sequence[dict[str, Any]], factor: float) -> None:
    """Multiply the learning rates of an optimizer's groups."""
    for group in groups:
        group["lr"] *= factor
