"""Short descriptions of runners and runs: a line of text, and HTML for a notebook."""

from __future__ import annotations

import numbers
import reprlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.common.text import (
    HIDDEN,
    count_text,
    duration_text,
    is_secret,
    without_password,
)
from horovod_runner.results import panel_html
from horovod_runner.results.live import live
from horovod_runner.results.panel_html import draw

if TYPE_CHECKING:
    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.common.options import Options
    from horovod_runner.results.run import Attempt, Run

_OBJECTS: Final = ("spark", "resource_profile")  # of which only the type is named
_MAX_HOSTS: Final = 4
_MAX_METRICS: Final = 8
_MAX_WARNINGS: Final = 5
_MAX_ATTEMPTS: Final = 5  # of those before the last one, whose errors may have 64 KB each
_MAX_CHARACTERS: Final = 200
_EXAMINED_CHARACTERS: Final = 2000  # of a text, for passwords
_WRAPPED: Final = "margin:0;white-space:pre-wrap"


class _Short(reprlib.Repr):
    """Texts of values that may be large: of what is not plain, only the type is named.

    Passwords are replaced before a text is cut: a part of one is not recognized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 8
        self.maxstring = 80

    def repr_str(self, value: str, level: int) -> str:
        text = without_password(value[:_EXAMINED_CHARACTERS])
        if len(value) > _EXAMINED_CHARACTERS:
            text = f"{text[: self.maxstring - 5]}..."
        return super().repr_str(text, level)

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        # In its own order: sorting calls methods of the keys, and takes long if they are many.
        if level <= 0:
            return "{...}" if value else "{}"
        shown = [
            f"{self.repr1(key, level - 1)}: {self._entry(key, each, level - 1)}"
            for key, each in islice(value.items(), self.maxdict)
        ]
        return f"{{{', '.join([*shown, *(['...'] if len(value) > self.maxdict else [])])}}}"

    def _entry(self, key: object, value: Any, level: int) -> str:
        if isinstance(key, str) and isinstance(value, str) and is_secret(key, value):
            return HIDDEN
        return self.repr1(value, level)

    def repr1(self, value: Any, level: int) -> str:
        if isinstance(value, set | frozenset) and len(value) > self.maxset:
            return f"<{type(value).__name__} of {len(value):,} values>"
        return super().repr1(value, level)

    def repr_instance(self, value: Any, level: int) -> str:
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, dict):  # of a kind of its own
            return self.repr_dict(value, level)
        if isinstance(value, numbers.Integral):  # NumPy's are numbers, too
            return repr(int(value))
        if isinstance(value, numbers.Real):
            return repr(float(value))
        shape = tuple(getattr(value, "shape", None) or ())
        return f"<{type(value).__name__}{f' of shape {shape}' if shape else ''}>"


def value_text(value: object) -> str:
    """A value that ``main`` returned, in at most 200 characters, without passwords."""
    try:
        text = _Short().repr(value)
    except Exception:  # an object whose attributes cannot be read
        text = f"<{type(value).__name__}>"
    return _cut(text)


def run_text(run: Run) -> str:
    """A run in one line, for ``repr``."""
    parts = [_how(run), _ranks(run), f"on {run.where}" if run.where else ""]
    if run.result_text not in ("", "None"):
        parts.append(f"result {run.result_text}")
    if run.latest_metrics:
        parts.append(_metrics(run))
    if checkpoints := run.checkpoints:
        parts.append(f"checkpoints: {_checkpoints(checkpoints)}")
    if run.status == "failed" and run.attempts:
        parts.append(_error(run.attempts[-1]))
    if run.warnings:
        parts.append(count_text(len(run.warnings), "warning"))
    text = "; ".join(part for part in parts if part)
    return f"<Run {run.run_id} of {run.main or 'main'}: {text}>"


def run_html(run: Run) -> str:
    """A run for a notebook: as its panel, with what was asked for and what came out."""
    now = live(run)
    folds = [
        (f"attempt {each.number}: {_error(each)}", draw("pre", each.details, _WRAPPED))
        for each in [attempt for attempt in run.attempts if attempt.details][-_MAX_ATTEMPTS:]
    ]
    folds += panel_html.folded(now)
    return panel_html.head(now) + draw("facts", list(_facts(run))) + draw("details", folds)


def runner_text(options: Options, run: Run | None) -> str:
    """A runner in one line, for ``repr``: the options that differ from their defaults."""
    given = ", ".join(f"{name}={text}" for name, text in _given(options))
    last = "" if run is None else f"; last_run: {_how(run)}"
    return f"<HorovodRunner({given}){last}>" if last else f"HorovodRunner({given})"


def runner_html(options: Options, run: Run | None) -> str:
    """A runner for a notebook: its options that differ from their defaults, and its last run."""
    rows = [("ranks", _where(options)), *list(_given(options))[1:]]
    last = "" if run is None else f"<hr>{run_html(run)}"
    rows += [("last run", "none yet")] if run is None else []
    return f"<div><b>HorovodRunner</b></div>{draw('facts', rows)}{last}"


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    if run.recorded is not None and run.status == "running":
        yield "state", f"{_how(run)}: it had not ended"
    params = {name: value for name, value in run.params.items() if name != "np"}
    if params:
        texts = (
            f"{name}={HIDDEN if is_secret(name, value) else value_text(value)}"
            for name, value in params.items()
        )
        yield "arguments", ", ".join(texts)
    if run.ranks:
        yield "hosts", _hosts(run)
    if run.result_text:
        yield "result", run.result_text
    if checkpoints := run.checkpoints:
        path = without_password(checkpoints[-1].path)
        yield "checkpoints", f"{_checkpoints(checkpoints)}, {path}"
    before = run.attempts[:-1]
    if len(before) > _MAX_ATTEMPTS:
        yield "attempts", f"{run.attempts[-1].number:,}; those before the last one:"
    for attempt in before[-_MAX_ATTEMPTS:]:
        why = _error(attempt) or attempt.change or "ended"
        seconds = (attempt.ended or attempt.started) - attempt.started
        yield f"attempt {attempt.number}", f"{why} (after {duration_text(seconds)})"
    if run.warnings:
        more = len(run.warnings) - _MAX_WARNINGS
        shown = [*run.warnings[:_MAX_WARNINGS], *([f"and {more} more"] if more > 0 else [])]
        yield "warnings", "\n".join(shown)


def _how(run: Run) -> str:
    if run.timings.end is None:
        if run.recorded is None:
            return run.status
        recorded = time.strftime("%F %T", time.localtime(run.recorded))
        return f"{run.status} when this was recorded, on {recorded}"
    return f"{run.status} in {duration_text(run.timings.end - run.timings.queued)}"


def _ranks(run: Run) -> str:
    if not run.ranks:
        return "no ranks started"
    hosts = len({rank.host for rank in run.ranks})
    return f"{count_text(len(run.ranks), 'rank')} on {count_text(hosts, 'host')}"


def _hosts(run: Run) -> str:
    counts = Counter(rank.host for rank in run.ranks)
    shown = [f"{host} ({count_text(ranks, 'rank')})" for host, ranks in counts.items()]
    if len(shown) <= _MAX_HOSTS:
        return ", ".join(shown)
    return ", ".join([f"{len(shown)}: {shown[0]}", *shown[1 : _MAX_HOSTS - 1], "...", shown[-1]])


def _metrics(run: Run) -> str:
    metrics = list(run.latest_metrics.items())
    shown = [
        f"{name}={value if isinstance(value, int) else format(value, '.4g')}"
        for name, value in metrics[:_MAX_METRICS]
    ]
    return ", ".join([*shown, *(["..."] if len(metrics) > _MAX_METRICS else [])])


def _checkpoints(found: Sequence[Checkpoint]) -> str:
    return f"{len(found)}, the latest of step {found[-1].step:,}"


def _error(attempt: Attempt) -> str:
    return _cut(without_password(attempt.error))


def _where(options: Options) -> str:
    """How many ranks there are to be, and where, in words."""
    least = f"{abs(options.least)} to " if options.elastic else ""
    count = f"{least}{abs(options.most)}"
    ranks = "all slots" if count == "0" else f"{count} rank{'s' * (count != '1')}"
    if options.local:
        return f"{ranks}, processes on this machine"
    return f"{ranks} on {options.cluster_config.launcher.capitalize()}"


def _given(options: Any) -> Iterator[tuple[str, str]]:
    """The options that differ from their defaults, as one would write them, without secrets."""
    for option in fields(options):
        value = getattr(options, option.name)
        made = option.default_factory
        default = option.default if made is MISSING else made()
        if option.name == "np" or value != default:
            yield option.name, _option_text(option.name, value)


def _option_text(name: str, value: Any) -> str:
    if name == "env":
        return f"{{{', '.join(f'{key!r}: {HIDDEN}' for key in value)}}}"
    if is_dataclass(value):
        given = ", ".join(f"{key}={text}" for key, text in _given(value))
        return f"{type(value).__name__}({given})"
    if name in ("sinks", "ship_modules"):
        names = [
            each.__name__ if isinstance(each, ModuleType) else f"{type(each).__name__}(...)"
            for each in value
        ]
        return f"[{', '.join(names)}]"
    if isinstance(value, str | int | float | tuple | None):
        return without_password(repr(value))
    return f"<{type(value).__name__}>" if name in _OBJECTS else without_password(repr(str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
