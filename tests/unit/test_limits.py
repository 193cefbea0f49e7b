"""The time limits of a run: one value, which reaches all who wait."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import ClusterConfig, HorovodRunner, Limits
from horovod_runner.common.options import Options
from horovod_runner.driver.phases import TABLE
from horovod_runner.tools.commands.run_options import argument_texts
from horovod_runner.wire.job import Job
from horovod_runner.wire.transport import set_heartbeat

PACKAGE = Path(__file__).parents[2] / "horovod_runner"
NAMES = [limit.name for limit in fields(Limits)]


def test_every_limit_says_who_waits_and_what_follows() -> None:
    texts = argument_texts(inspect.getdoc(Limits) or "")
    assert list(texts) == NAMES
    for name, text in texts.items():
        assert re.search(r"\b(waits?|tries again|may take)\b.*\. Then ", text), name
    assert len(set(texts.values())) == len(NAMES)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("5", TypeError),
        (True, TypeError),
        (None, TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (0.0001, ValueError),
        (float("inf"), ValueError),
        (float("nan"), ValueError),
        (8 * 86_400, ValueError),
    ],
)
def test_a_limit_that_is_no_time_is_refused_with_its_name(value: Any, error: type) -> None:
    with pytest.raises(error, match=rf"^all_tasks is .*{re.escape(repr(value))}"):
        Limits(all_tasks=value)


def test_a_limit_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"Did you mean all_tasks\?"):
        Limits(all_task=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"cluster_config=ClusterConfig\(limits=\.\.\.\)"):
        HorovodRunner(np=-1, limits=Limits())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"limits .*Limits\(\.\.\.\), .* dict$"):
        ClusterConfig(limits={"all_tasks": 3})  # type: ignore[arg-type]


def test_only_what_differs_from_the_defaults_is_shown() -> None:
    assert repr(Limits(all_tasks=7, gloo=600)) == "Limits(all_tasks=7)"
    assert repr(Limits()) == "Limits()"


def test_the_limits_travel_in_the_job() -> None:
    options = Options(np=-2, cluster_config=ClusterConfig(limits=Limits(all_tasks=7)))
    job = pickle.loads(pickle.dumps(Job("1a2b", 2, options.for_ranks(), b"")))
    assert job.limits == Limits(all_tasks=7)


@pytest.mark.parametrize("limit", [Limits(), Limits(heartbeat=0.001), Limits(heartbeat=604_800)])
def test_zeromq_takes_every_limit(limit: Limits) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        set_heartbeat(opened, limit)
        assert opened.getsockopt(zmq.HEARTBEAT_TIMEOUT) == max(3, round(1000 * limit.heartbeat))
        assert opened.getsockopt(zmq.HEARTBEAT_IVL) > 0


def test_every_limit_is_read_somewhere() -> None:
    code = "".join(
        p.read_text() for p in PACKAGE.rglob("*.py") if p != PACKAGE / "common" / "limits.py"
    )
    read = {*re.findall(r"limits\.(\w+)", code)}
    read |= {row.limit for row in TABLE.values() if row.limit is not None}
    assert {*NAMES} - read == set()
    assert {row.limit for row in TABLE.values()} - {*NAMES, None} == set()


# Programs with ranks of their own, and checks of a machine: there is no job.
WITHOUT_JOB = {
    "tools/commands/doctor.py": {"SparkLauncher"},
    "spmd/horovod_start.py": {"Rendezvous", "gloo_variables"},
}


def test_whoever_has_the_limits_passes_them_on() -> None:
    """Many have a default for the limits, so that nothing else would notice a forgotten one."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    places = {name: place for tree in trees.values() for name, place in _takers(tree)}
    assert {"Channel", "Link", "Rendezvous", "Saver", "FanOut"} <= set(places)
    for path, tree in trees.items():
        forgotten = set(_calls_without(tree, places))
        assert forgotten == WITHOUT_JOB.get(str(path.relative_to(PACKAGE)), set()), path


def _takers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The functions and classes that take limits, with the number of arguments before them."""
    for node in tree.body:
        made = [node] if isinstance(node, ast.FunctionDef) and node.name[0] != "_" else []
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        for function in made:
            names = [each.arg for each in function.args.args if each.arg != "self"]
            if "limits" in [*names, *(each.arg for each in function.args.kwonlyargs)]:
                yield node.name, names.index("limits") if "limits" in names else 99


def _calls_without(tree: ast.Module, places: Mapping[str, int]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {keyword.arg for keyword in node.keywords}
            starred = any(isinstance(each, ast.Starred) for each in node.args)
            if name in places and "limits" not in given and not starred:
                yield from [name] * (len(node.args) <= places[name])
