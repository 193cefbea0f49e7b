"""Imports of sparkdl, horovod.keras and horovod.spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules import launch
from horovod_runner.tools.migrate.rules.rule import on, rule

# The module that has each name of sparkdl here.
_SPARKDL = {
    "sparkdl.HorovodRunner": "horovod_runner",
    "sparkdl.horovod.log_to_driver": "horovod_runner",
    "sparkdl.horovod.tensorflow.keras.LogCallback": "horovod_runner.keras.callbacks",
}
_GONE = (
    "sparkdl left Databricks' runtimes after 15.4 LTS ML. Its HorovodRunner is in horovod_runner"
)
_KERAS = re.compile(r"^horovod\.(tensorflow\.)?keras\b")
_AVERAGES_NOTHING = (
    "was written for Keras 2: on Keras 3 its optimizer averages no gradients. horovod_runner.keras "
    "has the same names"
)
_ESTIMATORS = re.compile(
    r"horovod\.spark(\.(torch|keras|lightning|common|run|run_elastic)(\..*)?)?"
)
_INSTALL = ("import horovod_runner.horovod_spark", "", "horovod_runner.horovod_spark.install()", "")


def uses_keras_2(code: Code) -> bool:
    """Whether the code says that it runs with Keras 2."""
    return "TF_USE_LEGACY_KERAS" in code.text or code.imports("tf_keras")


def _in_sparkdl(name: str) -> bool:
    return name.partition(".")[0] == "sparkdl"


@on(m.ImportFrom())
def _sparkdl(_code: Code, node: cst.ImportFrom) -> OldCode | None:
    imported = tree.imports_of(node)
    if not any(map(_in_sparkdl, imported)):
        return None
    homes = {_SPARKDL.get(name) for name in imported}
    if len(homes) == 1 and (home := homes.pop()):
        return OldCode(node, _GONE, {node.module: tree.becomes(home)})
    return OldCode(
        node,
        f"{_GONE}; it has HorovodRunner and log_to_driver, and LogCallback in "
        "horovod_runner.keras.callbacks. Image models and xgboost of sparkdl have no "
        "counterpart: see transformers, and xgboost.spark",
    )


@on(m.Import())
def _whole_sparkdl(code: Code, node: cst.Import) -> OldCode | None:
    if not any(map(_in_sparkdl, tree.imports_of(node))):
        return None
    names = {
        use: code.name(use)
        for use in code.all(cst.Attribute)
        if not isinstance(code.parent(use), cst.Attribute)
        and _in_sparkdl(tree.dotted(use))
        and code.name(use) == tree.dotted(use)
    }
    known = all(name in _SPARKDL for name in names.values())
    if len(node.names) > 1 or node.names[0].asname or not known or code.statement(node) is None:
        return OldCode(node, f"{_GONE}: import its names from there")
    modules = sorted({"horovod_runner", *(_SPARKDL[name] for name in names.values())})
    changes = {
        use: tree.becomes(f"{_SPARKDL[name]}.{name.rpartition('.')[2]}")
        for use, name in names.items()
    }
    new = cst.Import([cst.ImportAlias(tree.expression(module)) for module in modules])
    return OldCode(node, _GONE, {node: lambda _: new, **changes})


@on(m.ImportFrom(), when=lambda code: not uses_keras_2(code))
def _horovod_keras(_code: Code, node: cst.ImportFrom) -> OldCode | None:
    old, new = tree.dotted(node.module), "horovod_runner"
    if _KERAS.match(old):
        new = _KERAS.sub("horovod_runner.keras", old)
    elif tree.imports_of(node) in (["horovod.keras"], ["horovod.tensorflow.keras"]):
        old += ".keras"
    else:
        return None
    return OldCode(node, f"{old} {_AVERAGES_NOTHING}", {node.module: tree.becomes(new)})


@on(m.ImportAlias(), when=lambda code: not uses_keras_2(code))
def _horovod_keras_as(code: Code, alias: cst.ImportAlias) -> OldCode | None:
    module = tree.dotted(alias.name)
    if not _KERAS.match(module) or not isinstance(code.parent(alias), cst.Import):
        return None
    why = f"{module} {_AVERAGES_NOTHING}"
    if alias.asname is None:
        return OldCode(alias, f"{why}: import horovod_runner.keras as hvd")
    return OldCode(
        alias, why, {alias.name: tree.becomes(_KERAS.sub("horovod_runner.keras", module))}
    )


@rule
def _horovod_spark(code: Code) -> Iterator[OldCode]:
    """Imports of horovod.spark, whose estimators do not run with today's packages."""
    if code.imports("horovod_runner.horovod_spark") or any(launch.horovod_spark_run(code)):
        return
    imports: list[Any] = [*code.all(cst.Import), *code.all(cst.ImportFrom)]
    for node in sorted(imports, key=code.line):
        module = tree.dotted(getattr(node, "module", None))
        names = tree.imports_of(node) if module in ("", "horovod") else [module]
        names = [name for name in names if f"{name}.".startswith("horovod.spark.")]
        if not names:
            continue
        if not any(map(_ESTIMATORS.fullmatch, names)):
            yield OldCode(
                node,
                f"{names[0]} belongs to Horovod's own launch and has no counterpart. A rank has "
                "its GPU already, and hvd.local_rank() is its place on the host",
            )
            continue
        statement = code.statement(node)
        yield OldCode(
            node,
            "horovod.spark does not work with today's pyarrow, Keras 3 and Lightning 2. "
            "horovod_runner.horovod_spark.install() before the import gives its names to this "
            "package",
            {} if statement is None else {statement: tree.before(*_INSTALL)},
        )
        return
