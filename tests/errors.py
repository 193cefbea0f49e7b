"""What calls that must fail say, in a process whose results are looked at in another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Kind: TypeAlias = type[Exception] | tuple[type[Exception], ...]


def error_of(kind: Kind, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the exception of some kind that a call raises; empty if it raises none."""
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""
