"""Fills templates of pages: one HTML file each, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from horovod_runner.results.page import numbers
from horovod_runner.results.private_files import private

# Characters that HTML forbids, and those of terminals: all control characters but tab and newline.
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render(package: str, template: str, *, script: str = "", **values: object) -> str:
    """Fill a template. Every text in it is escaped.

    The browser runs ``script`` alone, whatever an error in this package lets through.
    """
    code = files(package).joinpath(script).read_text("utf-8") if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    found = (
        _environment(package)
        .get_template(template)
        .render(**values, script=code, scripts=f"'sha256-{digest}'" if code else "'none'")
    )
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", found)


def macros(template: str, **values: object) -> Any:
    """The macros of a template of this room, as attributes: functions that return markup."""
    return _environment(__package__).get_template(template, globals=values).module


@lru_cache
def _environment(package: str) -> Environment:
    """Templates of a package and of this room."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(each, "") for each in (package, __package__)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    for name in ("clock_time", "duration", "number", "percent", "size"):
        environment.filters[name] = getattr(numbers, name)
    return environment


def write(text: str, to: Path) -> None:
    """Write a page to a file that only this user can read."""
    with open(to, "wb", opener=private) as file:
        file.write(text.encode())
