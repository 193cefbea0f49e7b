"""Tests of what happens while a rank imports a framework."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.run.import_hooks import IMPORT_HOOKS
from horovod_runner.worker.imports import hooks
from horovod_runner.worker.imports.patches import instead_of
from tests.programs import ROOT, run_python

# A framework, as its versions are: `tools` has what hooks change.
OPS = """
def add(a, b):
    return a + b
class Optimizer:
    def step(self):
        return "step"
class Deprecated:
    @property
    def __class__(self):
        raise RuntimeError("use another name")
deprecated = Deprecated()
"""
# What a room of ours would have.
CHECKS = """
def change(ops):
    ops.add = lambda a, b: -1
def half(ops):
    ops.Optimizer.step = lambda self: "changed"
    ops.Optimizer.extra = ops.extra = 1
    ops.add = None
    ops.gone_function
def count(ops):
    ops.count = getattr(ops, "count", 0) + 1
def pin(framework):
    framework.pins = getattr(framework, "pins", 0) + 1
"""


class Frameworks:
    """A folder with packages that a process of its own imports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "checks.py").write_text(CHECKS)

    def add(self, version: str = "3.1", init: str = "", **modules: str) -> None:
        """Write a package `fastnet`."""
        package = self._folder / "fastnet"
        package.mkdir()
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n{init}")
        for name, source in modules.items():
            (package / f"{name}.py").write_text(source)

    def run(self, *lines: str) -> str:
        """What a program prints, whose ImportHook and install are ours."""
        given = [
            "from horovod_runner.wire.job_file import ImportHook",
            "from horovod_runner.worker.imports.hooks import install",
        ]
        path = os.pathsep.join([str(self._folder), str(ROOT)])
        done = run_python("\n".join([*given, *lines]), variables={"PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def frameworks(tmp_path: Path) -> Frameworks:
    return Frameworks(tmp_path)


INSTALL = "install([ImportHook('fastnet.ops', 'checks:change', 'nothing is added')])"
# As an editable install has one.
OTHER_FINDER = "import sys, importlib.machinery as m; sys.meta_path.insert(0, m.PathFinder())"


@pytest.mark.parametrize(
    ("init", "lines"),
    [
        ("from fastnet.ops import add", [INSTALL, "from fastnet import add"]),
        ("", [OTHER_FINDER, INSTALL, "from fastnet.ops import add"]),
        ("", [INSTALL, "import fastnet", "from fastnet.ops import add"]),
    ],
    ids=["taken by its package", "another finder", "imported after its package"],
)
def test_a_hook_runs_before_anybody_takes_names_of_its_module(
    frameworks: Frameworks, init: str, lines: list[str]
) -> None:
    frameworks.add(init=init, ops=OPS)
    assert frameworks.run(*lines, "print(add(1, 2))") == "-1"


def test_a_changed_function_keeps_its_name_its_text_and_its_arguments() -> None:
    module = SimpleNamespace(clip=textwrap.shorten)
    plain = inspect.signature(module.clip)

    @instead_of(module, "clip")
    def clip(plain: Any, *args: Any, **options: Any) -> Any:
        return plain(*args, **options).upper()

    assert module.clip("a text", 20) == "A TEXT"
    assert module.clip.__name__ == "shorten"
    assert module.clip.__doc__ == textwrap.shorten.__doc__
    assert inspect.signature(module.clip) == plain


def test_a_gone_attribute_costs_its_hook_alone_and_is_told_once(frameworks: Frameworks) -> None:
    frameworks.add(init="import fastnet.ops", ops=OPS)
    out = frameworks.run(
        "install([ImportHook('fastnet.ops', 'checks:half', 'steps are not seen'),",
        "         ImportHook('fastnet.ops', 'checks:count', 'nothing is counted')])",
        "import fastnet, sys",
        "del sys.modules['fastnet.ops'], sys.modules['fastnet']",
        "import fastnet",
        "ops = fastnet.ops",
        "print(ops.count, ops.add(1, 2), ops.Optimizer().step())",
        "print(hasattr(ops, 'extra'), hasattr(ops.Optimizer, 'extra'))",
    )
    notice, *rest = out.splitlines()
    assert rest == ["1 3 step", "False False"]
    assert "does not fit fastnet 3.1. In this run steps are not seen." in notice
    assert "fastnet.ops has no attribute gone_function" in notice
    assert "GO WRONG" not in notice


def test_what_has_moved_is_told_together_with_what_is_gone(frameworks: Frameworks) -> None:
    frameworks.add(init="import fastnet.moved", moved=OPS)
    out = frameworks.run(
        "install([",
        "    ImportHook('fastnet.ops', 'checks:change', 'sums are not averaged', trains=True),",
        "    ImportHook('fastnet.a.b', 'checks:change', 'nothing is compared'),",
        "    ImportHook('fastnet.moved', 'checks:half', 'steps are not seen'),",
        "    ImportHook('fastnet', 'checks:pin', 'there is no GPU'),",
        "])",
        "import fastnet",
        "import fastnet",
        "print(fastnet.pins)",
    )
    assert out.count("\n") == 1
    assert out.endswith("\n1")
    assert (
        "does not fit fastnet 3.1. THE TRAINING CAN GO WRONG, because sums are not averaged. "
        "In this run steps are not seen; nothing is compared. " in out
    )
    assert "there is no module fastnet.ops" in out


@pytest.mark.parametrize(
    "hook",
    [
        "ImportHook('fastnet.new|fastnet.ops', 'checks:change', 'nothing is added')",
        "ImportHook('fastnet.new', 'checks:change', 'nothing is added', sign='of_version_4')",
        "ImportHook('other.new', 'checks:change', 'nothing is added')",
    ],
)
def test_nothing_is_told_about_other_versions_and_frameworks(
    frameworks: Frameworks, hook: str
) -> None:
    frameworks.add(ops=OPS)
    assert frameworks.run(f"install([{hook}])", "import fastnet") == ""


def test_a_forked_rank_tells_what_its_fork_server_lacks(frameworks: Frameworks) -> None:
    """The same process here: hooks run once, and those for ranks in the rank."""
    frameworks.add(init="import fastnet.ops", ops=OPS)
    out = frameworks.run(
        "table = [ImportHook('fastnet.ops', 'checks:half', 'steps are not seen'),",
        "         ImportHook('fastnet.ops', 'checks:count', 'nothing is counted'),",
        "         ImportHook('fastnet', 'checks:pin', 'no GPU', only_ranks=True)]",
        "install(table, in_rank=False)",
        "import fastnet",
        "print(hasattr(fastnet, 'pins'))",
        "install(table)",
        "install(table)",
        "print(fastnet.pins, fastnet.ops.count)",
    )
    first, notice, last = out.splitlines()
    assert (first, last) == ("False", "1 1")
    assert "In this run steps are not seen." in notice


def test_a_failed_import_can_be_repeated(frameworks: Frameworks) -> None:
    frameworks.add(ops=f"import os\n{OPS}\nos.environ['READY']")
    out = frameworks.run(
        "import os",
        INSTALL,
        "try:",
        "    import fastnet.ops",
        "except KeyError as error:",
        "    print(error)",
        "os.environ['READY'] = '1'",
        "import fastnet.ops",
        "print(fastnet.ops.add(1, 2))",
    )
    assert out.splitlines() == ["'READY'", "-1"]


def test_every_hook_is_a_function_of_this_package() -> None:
    for hook in IMPORT_HOOKS:
        assert hook.function.startswith(".")
        module, _, path = hook.function.partition(":")
        spec = importlib.util.find_spec(module, "horovod_runner")
        assert spec
        assert spec.origin
        tree = ast.parse(Path(spec.origin).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert path.rpartition(".")[2] in functions, hook.function


def test_a_rank_imports_the_functions_of_hooks_with_the_framework(frameworks: Frameworks) -> None:
    out = frameworks.run(
        "import sys",
        "import horovod_runner.worker.main",
        "from horovod_runner.run.import_hooks import IMPORT_HOOKS",
        "install(IMPORT_HOOKS)",
        "rooms = {f\"horovod_runner{hook.function.partition(':')[0]}\" for hook in IMPORT_HOOKS}",
        "print(rooms & {*sys.modules})",
    )
    assert out == "set()"


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty module with the name of a framework, which a rank would import now."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    hooks.install(())
    frozen = gc.get_freeze_count()  # by tests before this one
    gc.unfreeze()
    yield tmp_path / "pytorch_lightning.py"
    if frozen:
        gc.freeze()
    else:
        gc.unfreeze()


def test_no_garbage_is_collected_while_a_framework_is_imported(framework: Path) -> None:
    framework.write_text("import gc\ncollected = gc.isenabled()\n")
    module = importlib.import_module("pytorch_lightning")
    assert not module.collected
    assert gc.isenabled()
    assert module.__spec__
    assert module.__loader__ is module.__spec__.loader
    assert not type(module.__loader__).__module__.startswith("horovod_runner")


def test_collections_do_not_search_what_the_first_framework_has_made(framework: Path) -> None:
    framework.write_text("made = [[] for _ in range(1000)]\n")
    importlib.import_module("pytorch_lightning")
    assert gc.get_freeze_count() > 1000
    own: list[list[int]] = [[]]
    del sys.modules["pytorch_lightning"]
    importlib.import_module("pytorch_lightning")
    assert any(each is own for each in gc.get_objects())


def test_garbage_is_collected_again_after_a_failed_import(framework: Path) -> None:
    framework.write_text("import not_a_module\n")
    with pytest.raises(ModuleNotFoundError, match="not_a_module"):
        importlib.import_module("pytorch_lightning")
    assert gc.isenabled()


def test_garbage_stays_where_main_has_switched_collection_off(framework: Path) -> None:
    framework.write_text("")
    gc.disable()
    try:
        importlib.import_module("pytorch_lightning")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_loader_of_a_framework_has_what_its_own_has(framework: Path) -> None:
    framework.write_text("")
    spec = importlib.util.find_spec("pytorch_lightning")
    assert spec
    assert spec.loader
    assert spec.loader.get_filename() == str(framework)  # type: ignore[attr-defined]
