"""Tests of what happens while a rank imports a framework."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_runner.worker import redirect


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty module with the name of a framework, which a rank would import now."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    redirect.keras_on_import()
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
    assert "redirect" not in type(module.__loader__).__module__


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
