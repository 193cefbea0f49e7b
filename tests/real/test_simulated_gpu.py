"""Programs of the pages on a machine with two GPUs, which are simulated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.real.pages import ROOT, Reader, blocks

pytestmark = [pytest.mark.horovod, pytest.mark.spark, pytest.mark.xdist_group("pages")]

SIMULATED = (sys.executable, str(ROOT / "tests" / "simulated_gpu.py"))
#: Pages whose programs run with torch; True: only the first one.
PAGES = {
    "README.md": False,
    "docs/index.md": False,
    "docs/get_started/laptop.md": False,
    "docs/get_started/spark.md": False,
    "docs/tutorials/dataframe.md": False,
    "docs/tutorials/fit.md": False,
    "docs/tutorials/pytorch.md": False,
    "docs/howto/checkpoints.md": True,
    "docs/howto/data.md": True,
    "docs/howto/delta.md": False,
    "docs/howto/from_databricks.md": False,
    "docs/howto/from_horovod_spark.md": True,
    "docs/howto/from_petastorm.md": False,
    "docs/howto/mixed_precision.md": True,
    "docs/howto/mlflow.md": False,
    "docs/howto/spot.md": False,
    "docs/howto/tune.md": False,
}


@pytest.fixture(scope="module")
def read() -> Iterator[Reader]:
    reader = Reader(*SIMULATED)
    yield reader
    assert reader.end() == 0


# Slow: whole programs, and each operation of torch goes through Python.
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_unchanged_where_there_are_gpus(page: str, read: Reader) -> None:
    for block, printed in zip(blocks(page), read(page, first=PAGES[page]), strict=False):
        # What a page shows of losses and accuracies holds there, too.
        if block.prints is not None and block.reason is None:
            assert len(printed.splitlines()) == len(block.prints.splitlines()), printed


_START = """
import pandas as pd
import torch
from horovod_runner import HorovodRunner

rows = pd.DataFrame({"a": [0.0, 1.0] * 8, "b": [1.0, 0.0] * 8})


def train(data):
    import horovod.torch as hvd

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(device)
"""
_BATCHES = '    for x, y in data.to_torch(4, {"x": ["a"], "y": "b"}):\n'
_END = "\n\nprint(HorovodRunner(np=-1, driver_log_verbosity='all').run(train, data=rows))\n"
_BOTH = "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"


def run(
    main: str, folder: Path, *options: str, runner: str = ""
) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(_START + main + _END.replace("np=-1", f"np=-1{runner}"))
    return start(program, *options)


def start(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT)}
    return programs.run(*SIMULATED, *options, program, cwd=program.parent, variables=path)


WRONG = {
    "a model that is never moved": (
        "    model = torch.nn.Linear(1, 1)\n" + _BATCHES + "        model(x)\n",
        "Expected all tensors to be on the same device, but found at least two devices",
    ),
    "batches on the CPU and a model on the GPU": (
        "    model = torch.nn.Linear(1, 1).to(device)\n"
        + _BATCHES.replace("})", '}, device="cpu")')
        + "        model(x)\n",
        "Expected all tensors to be on the same device, but found at least two devices",
    ),
    "weights that are made on the CPU": (
        _BATCHES + "        loss = (x[:, 0] - y) * torch.ones(4)\n",
        _BOTH.format("cuda:0", "cpu"),
    ),
    "a sum on the CPU": (
        "    total = torch.zeros(())\n" + _BATCHES + "        total += y.sum()\n",
        _BOTH.format("cpu", "cuda:0"),
    ),
    "a GPU of another rank": (
        '    torch.ones(1, device="cuda:1")\n',
        "CUDA error: invalid device ordinal",
    ),
    "an array of a tensor on the GPU": (
        _BATCHES + "        return y.numpy()\n",
        "can't convert cuda:0 device type tensor to numpy",
    ),
}


@pytest.mark.parametrize(("main", "error"), WRONG.values(), ids=WRONG)
def test_a_simulated_gpu_finds_a_mistake_with_devices(
    main: str, error: str, tmp_path: Path
) -> None:
    done = run(main, tmp_path)
    assert done.returncode != 0, done.stdout
    assert error in done.stderr, done.stderr


def test_a_rank_computes_on_a_gpu_and_returns_tensors_of_the_cpu(tmp_path: Path) -> None:
    main = "    model = torch.nn.Linear(1, 1).to(device)\n" + _BATCHES
    main += "        (hvd.allreduce(model(x)) ** 2).sum().backward()\n"
    main += "    print('trained on', model.weight.grad.device)\n"
    main += "    return model.weight.grad.device.type, model.weight, model.state_dict()\n"
    done = run(main, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on cuda:0" in done.stdout
    assert "('cuda', Parameter containing:\n" in done.stdout
    assert "device=" not in done.stdout  # torch shows it unless it is the CPU


# A machine with GPUs whose Horovod was built without the CUDA toolkit.

_REDUCE = "    return hvd.allreduce(torch.ones(3, device=device)).sum().item()\n"


def test_without_nccl_a_program_trains_on_the_cpu_and_the_driver_says_why(tmp_path: Path) -> None:
    done = run(_REDUCE, tmp_path, "--no-nccl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cpu", "3.0"]
    assert "GPUs, and a Horovod that was built without NCCL: the ranks train on CPUs" in done.stderr
    assert "horovod-runner install --gpu" in done.stderr


def test_without_nccl_a_tensor_on_a_gpu_is_refused_before_it_would_abort_the_rank(
    tmp_path: Path,
) -> None:
    done = run(_REDUCE, tmp_path, "--no-nccl", runner=", gpus_per_rank=1")
    assert (
        "GpuError: a tensor on cuda:0 was passed to Horovod, which was built without" in done.stderr
    )
    assert "without NCCL: the ranks train" not in done.stderr
    assert ", in train" in done.stderr


def test_without_nccl_code_of_torch_distributed_keeps_its_gpu(tmp_path: Path) -> None:
    program = """
from horovod_runner import HorovodRunner

def train():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return torch.ones(1, device="cuda").device

print(HorovodRunner(np=-1).run(train))
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = start(path, "--no-nccl")
    assert done.stdout.splitlines() == ["cuda:0"], done.stderr
