"""Pins GPUs on import, with fake frameworks that record the calls: needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCH = """
class cuda:
    queued = []
    current = None
    @classmethod
    def _lazy_call(cls, call):
        cls.queued.append(call)
    @classmethod
    def set_device(cls, index):
        cls.current = index
class version:
    cuda = {cuda}
"""

TENSORFLOW = """
class config:
    visible = None
    @classmethod
    def list_physical_devices(cls, kind):
        return ["gpu0", "gpu1", "gpu2"]
    @classmethod
    def set_visible_devices(cls, device, kind):
        cls.visible = device, kind
"""


def run(tmp_path: Path, module: str, source: str, show: str, device: str | None) -> str:
    (tmp_path / f"{module}.py").write_text(source)
    code = f"""
from horovod_runner.run.import_hooks import IMPORT_HOOKS
from horovod_runner.worker.imports.hooks import install
install(hook for hook in IMPORT_HOOKS if hook.module == {module!r})
import {module}
print({show})
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    if device is not None:
        environment["HOROVOD_RUNNER_DEVICE"] = device
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


def test_torchs_current_device_is_set_when_cuda_starts(tmp_path: Path) -> None:
    show = "torch.cuda.current, [call() for call in torch.cuda.queued], torch.cuda.current"
    assert run(tmp_path, "torch", TORCH.format(cuda="'13.0'"), show, "2") == "None [None] 2"


def test_a_cpu_build_of_torch_is_not_changed(tmp_path: Path) -> None:
    assert run(tmp_path, "torch", TORCH.format(cuda=None), "torch.cuda.queued", "2") == "[]"


def test_tensorflow_sees_only_the_ranks_device(tmp_path: Path) -> None:
    show = "tensorflow.config.visible"
    assert run(tmp_path, "tensorflow", TENSORFLOW, show, "1") == "('gpu1', 'GPU')"


@pytest.mark.parametrize("module", ["torch", "tensorflow"])
def test_without_gpus_frameworks_are_not_changed(tmp_path: Path, module: str) -> None:
    source = TORCH.format(cuda="'13.0'") if module == "torch" else TENSORFLOW
    show = {"torch": "torch.cuda.queued", "tensorflow": "tensorflow.config.visible"}[module]
    assert run(tmp_path, module, source, show, None) in ("[]", "None")


def test_a_framework_that_cannot_be_pinned_is_imported_all_the_same(tmp_path: Path) -> None:
    source = "class version:\n    cuda = '14.0'\nclass cuda:\n    pass\n__version__ = '9.9'"
    notice, shown = run(tmp_path, "torch", source, "torch.version.cuda", "1").splitlines()
    assert shown == "14.0"
    assert "torch 9.9. In this run ranks of a host use the same GPU with torch, unless" in notice
    assert "cuda has no attribute _lazy_call" in notice
