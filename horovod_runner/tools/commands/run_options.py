"""The options of `horovod-runner run`, made from the fields and docstrings of the Python options.

So the command line and Python have the same options, with the same defaults and the same words.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, fields
from typing import Any, Final

from horovod_runner.common import options
from horovod_runner.common.arguments import did_you_mean, meant
from horovod_runner.run.runner import HorovodRunner

# Objects of Python, and what the command finds out by itself.
_LEFT_OUT = {"np", "sinks", "spark", "resource_profile", "launcher", "limits", *options.GROUPS}
#: What differs from Python: whoever runs a script wants to see what it prints.
DEFAULTS: Final = {"driver_log_verbosity": "all"}
# The classes of options, each with the class whose docstring describes them.
_KINDS: Final[tuple[tuple[type[Any], type[Any]], ...]] = (
    (options.Options, HorovodRunner),
    *((group, group) for group in options.GROUPS.values()),
)
_NUMBERS: Final[dict[str, Callable[[str], Any]]] = {"int": int, "float": float}


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE, for argparse."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def ranks_or_range(text: str) -> int | tuple[int, int]:
    """N or LEAST:MOST, for argparse."""
    least, colon, most = text.partition(":")
    try:
        return (int(least), int(most)) if colon else int(least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor LEAST:MOST") from None


def add(parser: argparse.ArgumentParser) -> None:
    """Add an argument for each option that a command line can give, by groups as in Python."""
    for kind, documented in _KINDS:
        add_argument = parser.add_argument
        if documented is not HorovodRunner:
            title = (inspect.getdoc(documented) or "").partition("\n")[0].rstrip(".").lower()
            add_argument = parser.add_argument_group(title).add_argument
        for option, text in _documented(kind, documented):
            default = DEFAULTS.get(option.name, options.default_of(option.name))
            keywords = {"default": default, **_keywords(option, text, default)}
            add_argument(_flag(option.name), dest=option.name, **keywords)
    device = parser.add_mutually_exclusive_group()
    for name, gpus, text in (
        ("--gpu", 1.0, "a GPU for each rank, and an error where there are too few"),
        ("--cpu", 0.0, "no GPUs"),
    ):
        device.add_argument(name, action="store_const", dest="gpus_per_rank", const=gpus, help=text)


def chosen(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that were parsed, by their names in Python; modules are still names."""
    values = {
        option.name: getattr(parsed, option.name)
        for kinds in _KINDS
        for option, _ in _documented(*kinds)
    }
    values["env"] = dict(values["env"])
    return values


def suggest_flags(strays: Iterable[str], command: argparse.ArgumentParser) -> str:
    """Return what unknown arguments of a command probably stand for; empty without a suggestion."""
    # The help has a line for each option: "  -o, --output FILE  the file to write".
    listed = re.findall(r"^  (-.*?)(?:  |$)", command.format_help(), re.MULTILINE)
    flags = re.findall(r"(?<!\S)-[\w-]+", " ".join(listed))
    aliases = {_flag(name): _flag(here) for name, here in options.ALIASES.items()}
    aliases |= dict.fromkeys(("-np", "-n", "-nproc"), "--np")
    found = []
    for stray in strays:
        if stray.startswith("-"):
            text = meant(stray.partition("=")[0].replace("_", "-"), flags, aliases)
            found += [text] if text in flags else []
    return did_you_mean(" and ".join(dict.fromkeys(found)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _documented(kind: type[Any], documented: type[Any]) -> Iterator[tuple[Field[Any], str]]:
    """The options of a class that a command line can give, each with its text in a docstring."""
    texts = argument_texts(inspect.getdoc(documented) or "")
    for option in fields(kind):
        if option.name not in _LEFT_OUT:
            yield option, texts.get(option.name, "")  # none with python -OO


def argument_texts(docstring: str) -> dict[str, str]:
    """The texts of the arguments in a clean docstring, by their names, as plain text."""
    section = docstring.partition("Args:")[2].partition("\nRaises:")[0]
    texts: dict[str, str] = {}
    for name, text in re.findall(r"^ {4}(\w+): ((?:.+\n?)(?: {8}.+\n?)*)", section, re.MULTILINE):
        plain = re.sub(r"\s+", " ", text).strip()
        plain = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", plain)
        texts[name] = plain.replace("``", "").replace("%", "%%")
    return texts


def _keywords(option: Field[Any], text: str, default: object) -> dict[str, Any]:
    """The keywords of ``add_argument`` for an option, by its type."""
    text = text[:1].lower() + text[1:] if text[1:2].islower() else text
    name = str(option.type).removesuffix(" | None")
    choices = options.choices_of(option)
    kind = name.partition("[")[0]
    keywords: dict[str, Any] = {}
    note = "" if default is None or kind not in _NUMBERS else f" (default: {default})"
    if kind in ("bool", "bool | Sequence"):  # a script runs once: to name frameworks gains little
        keywords["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif kind.startswith("bool | "):
        keywords = {"type": _true_or_path, "metavar": "PATH"}
        note = ' Here, "true" stands for True.'
    elif kind == "Mapping":
        keywords = {"action": "append", "default": [], "type": pair, "metavar": "NAME=VALUE"}
        note = " May be repeated."
    elif kind == "Sequence":
        keywords = {"default": [], "type": _names, "metavar": "NAMES"}
        note = " Their names, with commas between them."
    elif kind in _NUMBERS:
        keywords = {"type": _NUMBERS[kind], "metavar": "N"}
        if kind != str(option.type) and default is not None:
            keywords["type"] = _or_none(_NUMBERS[kind])
            note += " (none: no limit)"
    elif choices:
        keywords["choices"] = choices
        keywords["type"] = lambda given: next((c for c in choices if str(c) == given), given)
        note = "" if default is None else f" (default: {default})"
    else:
        keywords["metavar"] = "TEXT" if kind == "str" and "PathLike" not in name else "PATH"
    return {**keywords, "help": text + note}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _true_or_path(text: str) -> bool | str:
    return True if text.lower() == "true" else text


def _or_none(number: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else number(text)

    parse.__name__ = number.__name__
    return parse
