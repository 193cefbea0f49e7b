"""Compares what networks have learned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def assert_close(weights: Iterable[Any], expected: Iterable[Any], **tolerance: float) -> None:
    """Assert that arrays are like others, each like the one in its place.

    Args:
        weights: the arrays.
        expected: the others.
        **tolerance: ``rtol`` and ``atol``, as numpy.testing.assert_allclose has them.
    """
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def weights_of(model: Any) -> list[Any]:
    """The weights of a model of Spark ML whose network is a torch module."""
    return [value.numpy() for value in model.getModel().state_dict().values()]
