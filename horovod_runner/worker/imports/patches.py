"""Replaces functions and methods of a framework; what import hooks and checks do it with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that is called instead of another one, with that one as first argument.

        @instead_of(module.CSVLogger, "on_train_begin")
        def on_train_begin(plain, self, logs=None):
            ...
            plain(self, logs)

    Args:
        owner: a module, a class or an object.
        name: of its function or method.

    Raises:
        AttributeError: it has none, as in another version of the framework.
    """
    plain = getattr(owner, name)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **options: Any) -> Any:
            return function(plain, *args, **options)

        setattr(owner, name, call)
        return call

    return decorate
