"""Which GPU a rank gets, in all ways of pinning; refusals; two ranks on one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from horovod_runner.common.text import count_text
from horovod_runner.errors import GpuError
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyReading, check, equal
from horovod_runner.tools.verify.machine import ThisMachine

_PAGE: Final = "howto/gpu.md#which-gpu-a-rank-gets"
_GPU: Final = Needs(gpus=1)
_TENSORFLOW: Final = Needs(gpus=1, frameworks=("tensorflow",))


class Device(NamedTuple):
    """The GPUs as a rank sees them."""

    local_rank: int
    early: bool  # whether CUDA had started before the rank's code used it
    gpus: int  # how many the framework sees
    current: int  # the number of the device that code without a number uses; -1 without one
    uuid: str  # of that device, without "GPU-"; empty if the framework does not say it
    total: float  # the sum over all ranks of rank + 1, on that device


def torch_device(pin: bool, on_cpu: bool = False) -> Device:
    """Use torch's current device on this rank; the ranks' ``main``.

    With ``pin`` it calls ``torch.cuda.set_device(hvd.local_rank())``, as Horovod's examples do.
    """
    import horovod.torch as hvd
    import torch

    early = torch.cuda.is_initialized()
    hvd.init()
    if not torch.cuda.is_available():
        total = hvd.allreduce(torch.ones(1) * (hvd.rank() + 1), op=hvd.Sum)
        return Device(hvd.local_rank(), early, 0, -1, "", float(total[0]))
    if pin:
        torch.cuda.set_device(hvd.local_rank())
    mine = torch.ones(1, device="cuda") * (hvd.rank() + 1)
    total = hvd.allreduce(mine.cpu() if on_cpu else mine, op=hvd.Sum)
    current = mine.device.index
    uuid = getattr(torch.cuda.get_device_properties(current), "uuid", "")
    count = torch.cuda.device_count()
    return Device(hvd.local_rank(), early, count, current, str(uuid), float(total[0]))


def tensorflow_device(pin: bool) -> Device:
    """Use TensorFlow's first visible GPU on this rank; the ranks' ``main``.

    With ``pin`` it calls ``set_visible_devices`` by local_rank, as Horovod's examples do.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    physical = tf.config.list_physical_devices("GPU")
    if pin and physical:
        tf.config.set_visible_devices(physical[hvd.local_rank()], "GPU")
    shown = tf.config.get_visible_devices("GPU")
    with tf.device("GPU:0" if shown else "CPU:0"):
        total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
    current = physical.index(shown[0]) if len(shown) == 1 else -1
    return Device(hvd.local_rank(), False, len(physical), current, "", float(total[0]))


@check(_PAGE, 90, _GPU)
def current(case: VerifyCase) -> Iterator[VerifyReading]:
    """Each rank gets one GPU, in the order of local_rank, and code that pins nothing uses it."""
    yield from _run(case, pin=False, expected=_in_order(case.machine))


@check(_PAGE, 90, _GPU)
def pinned(case: VerifyCase) -> Iterator[VerifyReading]:
    """Code that pins itself by hvd.local_rank() uses the rank's own GPU."""
    yield from _run(case, pin=True, expected=_in_order(case.machine))


@check(_PAGE, 90, _GPU)
def mask(case: VerifyCase) -> Iterator[VerifyReading]:
    """gpu_pinning="mask" shows a rank only its own GPU, as device 0."""
    own = [Expected(1, 0, gpu.uuid) for gpu in case.machine.gpus]
    yield from _run(case, pin=False, expected=own, gpu_pinning="mask")


@check(_PAGE, 90, Needs(gpus=2))
def order(case: VerifyCase) -> Iterator[VerifyReading]:
    """The ranks follow the order of CUDA_VISIBLE_DEVICES."""
    backwards = case.machine.gpus[::-1]
    # In this process alone, which runs this check alone.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid or gpu.device for gpu in backwards)
    turned = ThisMachine(gpus=backwards)
    yield from _run(case, pin=True, expected=_in_order(turned))


@check(_PAGE, 90, Needs(gpus=4))
def two_each(case: VerifyCase) -> Iterator[VerifyReading]:
    """With gpus_per_rank=2, devices[hvd.local_rank()] is the first GPU of each rank."""
    count = len(case.machine.gpus) // 2
    firsts = case.machine.gpus[: 2 * count : 2]
    expected = [Expected(2 * count, rank, gpu.uuid) for rank, gpu in enumerate(firsts)]
    yield from _run(case, pin=True, expected=expected, gpus_per_rank=2)


@check("howto/warm.md", 90, _GPU)
def preloaded(case: VerifyCase) -> Iterator[VerifyReading]:
    """Ranks that are forked with torch imported use their GPUs."""
    runner = case.runner(case.ranks(), preload_frameworks=True)
    runner.run(torch_device, pin=False)  # starts the process that they are forked from
    results = runner.run_all(torch_device, pin=False)
    texts = [line.text for line in runner.last_run.logs] if runner.last_run is not None else []
    yield read_start(texts)
    yield from read_devices(results, _in_order(case.machine))


def read_start(texts: Sequence[str]) -> VerifyReading:
    """Whether the ranks were forked, of what a run has printed."""
    lines = [line for text in texts for line in text.splitlines()]
    seen = next((line for line in lines if "start: " in line), "not said").partition("start: ")[2]
    return VerifyReading("start of the ranks", seen, "warm", seen == "warm")


@check(_PAGE, 120, _TENSORFLOW)
def tensorflow(case: VerifyCase) -> Iterator[VerifyReading]:
    """TensorFlow sees only the rank's own GPU."""
    yield from _run_tensorflow(case, pin=False)


@check(_PAGE, 120, _TENSORFLOW)
def tensorflow_pinned(case: VerifyCase) -> Iterator[VerifyReading]:
    """TensorFlow code that pins itself by hvd.local_rank() uses the rank's own GPU."""
    yield from _run_tensorflow(case, pin=True)


def _run_tensorflow(case: VerifyCase, *, pin: bool) -> list[VerifyReading]:
    expected = [e._replace(uuid="") for e in _in_order(case.machine)]
    runner = case.runner(len(expected), "tensorflow")
    return read_devices(runner.run_all(tensorflow_device, pin=pin), expected)


@check("howto/gpu.md", 60)
def hidden(case: VerifyCase) -> Iterator[VerifyReading]:
    """gpus_per_rank=0 trains on CPUs."""
    results = case.runner(2, gpus_per_rank=0).run_all(torch_device, pin=False)
    yield from read_devices(results, [Expected(0, -1, "")] * 2)


@check(_PAGE, 60)
def refused(case: VerifyCase) -> Iterator[VerifyReading]:
    """A run with more ranks than GPUs is refused before a rank starts."""
    count = len(case.machine.gpus)
    runner = case.runner(count + 1, gpus_per_rank=1)
    try:
        runner.run_all(torch_device, pin=False)
    except GpuError as error:
        seen = f"GpuError: {error}"
        has, needs = count_text(count, "GPU"), f"{count_text(count + 1, 'rank')} there need"
        told = f"has {has}, and {needs}" in str(error)
    else:
        seen, told = "the run was not refused", False
    name = f"{count + 1} ranks with gpus_per_rank=1 on {count} GPUs"
    yield VerifyReading(name, seen, "a GpuError with both numbers", told)
    started = len(runner.last_run.ranks) if runner.last_run is not None else 0
    yield equal("ranks that were started", started, 0)


@check("howto/gpu.md#two-ranks-on-one-gpu", 150, _GPU)
def shared(case: VerifyCase) -> Iterator[VerifyReading]:
    """gpus_per_rank=0.5 puts two ranks on one GPU.

    They reduce on the CPU, because NCCL has one rank per GPU.
    """
    runner = case.runner(2, gpus_per_rank=0.5)
    results = runner.run_all(torch_device, pin=False, on_cpu=True)
    yield from read_devices(results, [Expected(1, 0, case.machine.gpus[0].uuid)] * 2)
    yield from read_steps(runner.run_all(train_a_step), "cuda")
    yield read_refusal(case.runner(2, gpus_per_rank=0.5, hang_timeout=60).run_all(try_nccl))


class OnCpu:
    """A compression for Horovod's optimizers, with which gradients are reduced on the CPU."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Copy a gradient to the CPU; also returns where it was."""
        return tensor.cpu(), tensor.device

    @staticmethod
    def decompress(tensor: Any, device: Any) -> Any:
        """Copy a reduced gradient back."""
        return tensor.to(device)


def train_a_step() -> tuple[float, str]:
    """Take one step with gradients that are reduced on the CPU; the ranks' ``main``.

    Returns the weight, which was 0, and the type of its device.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 1.0), [("weight", weight)], compression=OnCpu
    )
    (weight * (hvd.rank() + 1)).sum().backward()  # the gradient is rank + 1
    optimizer.step()
    return float(weight.detach()), weight.device.type


def read_steps(results: Sequence[tuple[float, str]], device: str) -> list[VerifyReading]:
    """Judge the ranks' weights after :func:`train_a_step`."""
    count = len(results)
    name = "weight of each rank after a step with the gradients' mean"
    return [
        equal(name, [weight for weight, _ in results], [-(count + 1) / 2] * count),
        equal("device of the weight", [kind for _, kind in results], [device] * count),
    ]


def try_nccl() -> str:
    """Reduce on a GPU that another rank uses, too; the ranks' ``main``.

    Returns the first line of the error; empty if the sum was right.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    try:
        total = hvd.allreduce(torch.ones(1, device="cuda"), op=hvd.Sum)
    except Exception as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return "" if float(total[0]) == hvd.size() else f"a sum of {float(total[0])}"


def read_refusal(errors: Sequence[str]) -> VerifyReading:
    """Judge NCCL's answers to two ranks on one GPU."""
    refusals = {error for error in errors if error}
    wrong = any(error.startswith("a sum of") for error in refusals)
    seen = "; ".join(sorted(refusals)) or "the right sum"
    expected = "an error on both ranks (NCCL has one rank per GPU), or the right sum"
    ok = not wrong and (not refusals or all(errors))
    return VerifyReading("NCCL between two ranks on one GPU", seen, expected, ok)


class Expected(NamedTuple):
    """The GPUs that a rank should see: their number, and index and UUID of the current one."""

    gpus: int
    current: int
    uuid: str


def _in_order(machine: ThisMachine) -> list[Expected]:
    """A GPU for each rank in the order of local_rank, all of them visible."""
    return [Expected(len(machine.gpus), n, gpu.uuid) for n, gpu in enumerate(machine.gpus)]


def _run(
    case: VerifyCase, *, pin: bool, expected: Sequence[Expected], **options: Any
) -> list[VerifyReading]:
    results = case.runner(len(expected), **options).run_all(torch_device, pin=pin)
    return read_devices(results, expected)


def read_devices(results: Sequence[Device], expected: Sequence[Expected]) -> list[VerifyReading]:
    """Compare what the ranks see, in order, with what they should see."""
    gpus, current = [e.gpus for e in expected], [e.current for e in expected]
    readings = [
        equal("GPUs that a rank sees", [r.gpus for r in results], gpus),
        equal("current device of each rank", [r.current for r in results], current),
    ]
    # A framework, or an nvidia-smi that is not there, may not tell UUIDs.
    known = [e.uuid for e in expected]
    seen = [r.uuid for r in results]
    if any(seen) and all(known):
        own, right = [_plain(uuid) for uuid in seen], [_plain(uuid) for uuid in known]
        readings.append(equal("UUID of each rank's device", own, right))
    early = sum(result.early for result in results)
    readings.append(equal("ranks whose CUDA started with an import", early, 0))
    count = len(results)
    total = f"{count * (count + 1) / 2:g}"
    readings.append(equal("sum over the ranks", [f"{r.total:g}" for r in results], [total] * count))
    return readings


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")
