"""Lists a host's GPUs and pins a rank to its GPU.

Horovod code calls ``torch.cuda.set_device(hvd.local_rank())`` or
``set_visible_devices(gpus[hvd.local_rank()])``. Both need all GPUs of the host's ranks to be
visible, in local_rank order. Code without such a call must not use the first GPU on all ranks. So
all are visible, and the rank's device becomes the current one when torch or TensorFlow is imported.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from horovod_runner.common.limits import DEFAULTS
from horovod_runner.common.slots import Slot

if TYPE_CHECKING:
    from horovod_runner.common.options import Pinning

# An index, or the start of a UUID.
_DEVICE = re.compile(r"\d+$|GPU-|MIG-")


def visible_gpus(patience: float = DEFAULTS.nvidia_smi) -> tuple[str, ...]:
    """The GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES.

    Reads that variable, or nvidia-smi's list if it is not set, for ``patience`` seconds at most;
    empty without either.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        devices = map(str.strip, named.split(","))
        # CUDA ignores the first invalid entry and all that follow; "-1" and "" hide all, and so
        # does "NoDevFiles", which Slurm gives a step without GPUs.
        return tuple(takewhile(_DEVICE.match, devices))
    return tuple(index for index, _ in list_gpus(patience))


def local_device() -> str:
    """The device that a model of this process computes on: the current GPU of torch, or the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def list_gpus(patience: float = DEFAULTS.nvidia_smi) -> list[tuple[str, str]]:
    """This machine's NVIDIA GPUs as (index, "name, UUID"); empty without an NVIDIA driver."""
    rows = [line.split(", ", 1) for line in ask_nvidia_smi("index,name,uuid", patience)]
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def ask_nvidia_smi(what: str, patience: float = DEFAULTS.nvidia_smi) -> list[str]:
    """A line for each of this machine's GPUs, with these values; empty without an NVIDIA driver.

    Sizes of memory are numbers of MiB; a GPU that does not tell a value has "[N/A]".
    """
    import subprocess  # not at the top: workers import this module, and list no GPUs

    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if answer.returncode else answer.stdout.splitlines()


def identified_gpus() -> tuple[str, ...]:
    """:func:`visible_gpus` by UUID, which identifies a device on the whole host.

    In a container or job step with a single GPU the index is always "0". A GPU whose UUID is not
    known keeps its index.
    """
    uuids = {index: rest.rpartition(", ")[2] for index, rest in list_gpus()}
    return tuple(uuids.get(device, device) for device in visible_gpus())


def environment(slot: Slot, pinning: Pinning) -> dict[str, str]:
    """The environment variables that show a rank its GPUs; empty on a host without GPUs."""
    if not slot.host_gpus:
        return {}
    shown = slot.gpus if pinning == "mask" else slot.host_gpus
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(shown),
        "HOROVOD_RUNNER_DEVICE": str(shown.index(slot.gpus[0])),
    }
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        # nvidia-smi and Spark's discovery script number the devices in this order.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def pin_torch_here(torch: Any) -> None:
    """Make this rank's device torch's current one; called when torch is imported."""
    if (device := os.environ.get("HOROVOD_RUNNER_DEVICE")) is not None:
        pin_torch(torch, int(device))


def pin_tensorflow_here(tensorflow: Any) -> None:
    """Make this rank's device TensorFlow's only one; called when TensorFlow is imported."""
    if (device := os.environ.get("HOROVOD_RUNNER_DEVICE")) is not None:
        pin_tensorflow(tensorflow, int(device))


def pin_torch(torch: Any, index: int) -> None:
    """Make a GPU torch's current device."""
    if torch.version.cuda is None:
        return
    # Queued until CUDA starts: an import must not allocate GPU memory or prevent a later fork.
    torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))


def pin_tensorflow(tensorflow: Any, index: int) -> None:
    """Make a GPU the only one that TensorFlow sees. Raises a RuntimeError if that is too late."""
    devices = tensorflow.config.list_physical_devices("GPU")
    if index < len(devices):
        tensorflow.config.set_visible_devices(devices[index], "GPU")
