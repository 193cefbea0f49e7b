"""Pins GPUs on import, with fake frameworks that record the calls: needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_python

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
    variables = {"PYTHONPATH": path}
    if device is not None:
        variables["HOROVOD_RUNNER_DEVICE"] = device
    return run_python(code, variables=variables, check=True).stdout.strip()


WITH_CUDA, WITHOUT_CUDA = TORCH.format(cuda="'13.0'"), TORCH.format(cuda=None)
SET_WHEN_CUDA_STARTS = (
    "torch.cuda.current, [call() for call in torch.cuda.queued], torch.cuda.current"
)


@pytest.mark.parametrize(
    ("module", "source", "show", "device", "shown"),
    [
        ("torch", WITH_CUDA, SET_WHEN_CUDA_STARTS, "2", "None [None] 2"),
        ("torch", WITHOUT_CUDA, "torch.cuda.queued", "2", "[]"),
        ("torch", WITH_CUDA, "torch.cuda.queued", None, "[]"),  # on a host without GPUs
        ("tensorflow", TENSORFLOW, "tensorflow.config.visible", "1", "('gpu1', 'GPU')"),
        ("tensorflow", TENSORFLOW, "tensorflow.config.visible", None, "None"),
    ],
)
def test_a_framework_uses_the_ranks_device_alone(
    tmp_path: Path, *, module: str, source: str, show: str, device: str | None, shown: str
) -> None:
    assert run(tmp_path, module, source, show, device) == shown


def test_a_framework_that_cannot_be_pinned_is_imported_all_the_same(tmp_path: Path) -> None:
    source = "class version:\n    cuda = '14.0'\nclass cuda:\n    pass\n__version__ = '9.9'"
    notice, shown = run(tmp_path, "torch", source, "torch.version.cuda", "1").splitlines()
    assert shown == "14.0"
    assert "torch 9.9. In this run ranks of a host use the same GPU with torch, unless" in notice
    assert "cuda has no attribute _lazy_call" in notice
