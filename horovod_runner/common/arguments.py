"""Unknown arguments: errors that say which one was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from types import MappingProxyType
from typing import Any, Final, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[Any])
_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
_SHORT: Final = 40  # characters of a value that an error shows


def meant(
    name: str,
    known: Collection[str],
    aliases: Mapping[str, str] = _EMPTY,
    elsewhere: Mapping[str, str] = _EMPTY,
) -> str:
    """Return what an unknown name probably stands for; empty if nothing is like it.

    Args:
        name: what the user wrote.
        known: the names that exist.
        aliases: names that other programs or earlier versions have: each with the name here, or
            with a text with a "=" that says what to write instead. A name here that is neither
            known nor elsewhere is no suggestion: several functions may share their aliases.
        elsewhere: names that exist in another place, each with how to write it there.
    """

    def written(each: str) -> str:
        """How to write a name that exists or is an alias; otherwise empty."""
        if each in known:
            return each
        target = aliases.get(each, each)
        if target in known:
            return target
        return elsewhere.get(target, target if each in aliases and "=" in target else "")

    if text := written(name):
        return text
    from difflib import get_close_matches  # for errors only: every rank imports this module

    for names in (known, [each for each in (*elsewhere, *aliases) if written(each)]):
        for close in get_close_matches(name, names, n=1, cutoff=0.7):
            return written(close)
    return ""


def did_you_mean(text: str) -> str:
    """The sentence that follows an error; empty if there is no suggestion."""
    return f" Did you mean {text}?" if text else ""


def parameters_of(arguments: type[Any], options: type[Any]) -> list[Parameter]:
    """The parameters that ``**options: Unpack[arguments]`` stands for: those of a dataclass."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(options, name), annotation=type_)
        for name, type_ in options.__annotations__.items()
        if name in arguments.__annotations__
    ]


def suggest_arguments(
    aliases: Mapping[str, str] = _EMPTY,
    elsewhere: Callable[[], Mapping[str, str]] = dict,
    options: Sequence[Parameter] = (),
) -> Callable[[_Function], _Function]:
    """Decorate a function: for an unknown argument its TypeError names the one that was meant.

    The function keeps its signature, for editors and for ``inspect``.

    Args:
        aliases: as in :func:`meant`.
        elsewhere: returns names as in :func:`meant`; called only for an error.
        options: what the function's last parameter, ``**options``, stands for; ``inspect`` and
            the docs show these parameters in its place.
    """
    return lambda function: _checked(function, function.__name__, aliases, elsewhere, options)


def suggest_fields(
    aliases: Mapping[str, str] = _EMPTY,
    elsewhere: Callable[[], Mapping[str, str]] = dict,
    options: Sequence[Parameter] = (),
) -> Callable[[_Class], _Class]:
    """Decorate a class: :func:`suggest_arguments` for its constructor."""

    def decorate(kind: _Class) -> _Class:
        kind.__init__ = _checked(kind.__init__, kind.__name__, aliases, elsewhere, options)
        return kind

    return decorate


def _checked(
    function: _Function,
    called: str,
    aliases: Mapping[str, str],
    elsewhere: Callable[[], Mapping[str, str]],
    options: Sequence[Parameter],
) -> _Function:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    own = names[1:] if names[0] == "self" else names
    known = (*own, *(option.name for option in options))
    has_only_named = code.co_argcount == 1 and names[0] == "self"

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        for name in kwargs:
            if name not in known:
                text = meant(name, known, aliases, elsewhere())
                listed = "" if text else f" Its arguments are {', '.join(known)}."
                raise TypeError(
                    f"{called}() got an unexpected keyword argument {name!r}."
                    f"{did_you_mean(text)}{listed}"
                )
        if has_only_named and len(args) > 1:
            raise TypeError(
                f"{called}() has only named arguments: write {called}({known[0]}={_short(args[1])})"
            )
        return function(*args, **kwargs)

    if options:
        whole = inspect.signature(function)
        parameters = [*list(whole.parameters.values())[:-1], *options]
        checked.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def _short(value: object) -> str:
    """A value that is short as text; of others dots."""
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > 2 or not all(isinstance(part, bool | int | float | str) for part in parts):
        return "..."
    text = repr(value)
    return text if len(text) <= _SHORT else "..."
