"""Imports of sparkdl, horovod.keras and horovod.spark."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, dotted
from horovod_runner.migrate.edits import Finding
from horovod_runner.migrate.rules import launch

# What each name of sparkdl is called here: module, and the module's name for it.
_SPARKDL = {
    "sparkdl.HorovodRunner": "horovod_runner",
    "sparkdl.horovod.log_to_driver": "horovod_runner",
    "sparkdl.horovod.tensorflow.keras.LogCallback": "horovod_runner.keras.callbacks",
}
_GONE = (
    "sparkdl left Databricks' runtimes after 15.4 LTS ML. Its HorovodRunner is in horovod_runner"
)
_KERAS = ("horovod.keras", "horovod.tensorflow.keras")
_AVERAGES_NOTHING = (
    "was written for Keras 2: on Keras 3 its optimizer averages no gradients. horovod_runner.keras "
    "has the same names"
)
_SPARK_MODULES = ("torch", "keras", "lightning", "common", "run", "run_elastic")
_INSTALL = ("import horovod_runner.horovod_spark", "", "horovod_runner.horovod_spark.install()", "")


def sparkdl(code: Code) -> Iterator[Finding]:
    """Imports of Databricks' sparkdl."""
    for node in code.all(cst.ImportFrom):
        module = "" if node.module is None else dotted(node.module)
        if module.partition(".")[0] != "sparkdl":
            continue
        imported = [] if isinstance(node.names, cst.ImportStar) else node.names
        homes = {_SPARKDL.get(f"{module}.{dotted(alias.name)}") for alias in imported}
        home = homes.pop() if len(homes) == 1 else None
        if home is None or node.module is None:
            yield code.finding(
                node,
                f"{_GONE}; it has HorovodRunner and log_to_driver, and LogCallback in "
                "horovod_runner.keras.callbacks. Image models and xgboost of sparkdl have no "
                "counterpart: see transformers, and xgboost.spark",
            )
        else:
            yield code.finding(node, _GONE, code.replace(node.module, home))
    for whole in code.all(cst.Import):
        if any(dotted(alias.name).partition(".")[0] == "sparkdl" for alias in whole.names):
            yield _whole_sparkdl(code, whole)


def _whole_sparkdl(code: Code, node: cst.Import) -> Finding:
    """`import sparkdl`, and the names that are used through it."""
    uses = list(_outermost(code, "sparkdl"))
    statement = code.statement(node)
    known = all(code.name(use) in _SPARKDL for use in uses)
    if len(node.names) > 1 or node.names[0].asname is not None or not known or statement is None:
        return code.finding(node, f"{_GONE}: import its names from there")
    modules = sorted({"horovod_runner", *(_SPARKDL[code.name(use)] for use in uses)})
    edits = [
        code.replace(use, f"{_SPARKDL[code.name(use)]}.{code.name(use).rpartition('.')[2]}")
        for use in uses
    ]
    return code.finding(node, _GONE, code.replace(node, f"import {', '.join(modules)}"), *edits)


def _outermost(code: Code, package: str) -> Iterator[cst.Attribute]:
    """The longest dotted names that begin with a package."""
    for node in code.all(cst.Attribute):
        text = dotted(node)
        inner = isinstance(code.parent(node), cst.Attribute)
        if not inner and text.partition(".")[0] == package and code.name(node) == text:
            yield node


def horovod_keras(code: Code) -> Iterator[Finding]:
    """Imports of Horovod's modules for Keras."""
    if uses_keras_2(code):
        return
    for node in code.all(cst.ImportFrom):
        module = "" if node.module is None else dotted(node.module)
        if node.module is not None and module.startswith(_KERAS):
            new = _replaced(module)
            yield code.finding(
                node, f"{module} {_AVERAGES_NOTHING}", code.replace(node.module, new)
            )
        elif module in ("horovod", "horovod.tensorflow") and not isinstance(
            node.names, cst.ImportStar
        ):
            names = [dotted(alias.name) for alias in node.names]
            if names == ["keras"] and node.module is not None:
                yield code.finding(
                    node,
                    f"{module}.keras {_AVERAGES_NOTHING}",
                    code.replace(node.module, "horovod_runner"),
                )
    for imported in code.all(cst.Import):
        for alias in imported.names:
            module = dotted(alias.name)
            if not module.startswith(_KERAS):
                continue
            why = f"{module} {_AVERAGES_NOTHING}"
            if alias.asname is None:
                yield code.finding(imported, f"{why}: import horovod_runner.keras as hvd")
            else:
                yield code.finding(imported, why, code.replace(alias.name, _replaced(module)))


def _replaced(module: str) -> str:
    for name in reversed(_KERAS):
        if module == name or module.startswith(f"{name}."):
            return f"horovod_runner.keras{module.removeprefix(name)}"
    return module


def horovod_spark(code: Code) -> Iterator[Finding]:
    """Imports of horovod.spark, whose estimators do not run with today's packages."""
    if "horovod_runner.horovod_spark" in code.imported or any(launch.horovod_spark_run(code)):
        return
    for node, modules in sorted(_imports(code), key=lambda pair: code.line(pair[0])):
        parts = [name.split(".") for name in modules if f"{name}.".startswith("horovod.spark.")]
        if not parts:
            continue
        if all(part[2:3] and part[2] not in _SPARK_MODULES for part in parts):
            yield code.finding(
                node,
                f"{modules[0]} belongs to Horovod's own launch and has no counterpart. A rank has "
                "its GPU already, and hvd.local_rank() is its place on the host",
            )
            continue
        statement = code.statement(node)
        yield code.finding(
            node,
            "horovod.spark does not work with today's pyarrow, Keras 3 and Lightning 2. "
            "horovod_runner.horovod_spark.install() before the import gives its names to this "
            "package",
            *([] if statement is None else [code.before(statement, *_INSTALL)]),
        )
        return


def _imports(code: Code) -> Iterator[tuple[cst.CSTNode, list[str]]]:
    """The imports of a text, with the modules that they may name."""
    for node in code.all(cst.Import):
        yield node, [dotted(alias.name) for alias in node.names]
    for found in code.all(cst.ImportFrom):
        if found.module is None:
            continue
        module = dotted(found.module)
        if module == "horovod" and not isinstance(found.names, cst.ImportStar):
            yield found, [f"horovod.{dotted(alias.name)}" for alias in found.names]
        else:
            yield found, [module]


def uses_keras_2(code: Code) -> bool:
    """Whether the code says that it runs with Keras 2."""
    return "TF_USE_LEGACY_KERAS" in code.text or code.imports("tf_keras")
