"""Which GPUs a host shows, and how a rank is kept on its own.

Horovod code says ``torch.cuda.set_device(hvd.local_rank())`` or
``set_visible_devices(gpus[hvd.local_rank()])``. Both need all GPUs of the host's ranks to be
visible, in local_rank order; but code that forgets to pin must not pile onto the first GPU. So all
are visible, and the moment torch or TensorFlow is imported the rank's own device is made current.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from horovod_runner.topology import Slot

Pinning = Literal["current", "mask"]


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    That variable where it is set, else what nvidia-smi lists; empty without either.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        devices = [device.strip() for device in named.split(",")]
        # CUDA ignores everything from the first invalid entry on; "-1" and "" hide all.
        valid = []
        for device in devices:
            if not device or device.startswith("-"):
                break
            valid.append(device)
        return tuple(valid)
    return tuple(index for index, _ in list_gpus())


def list_gpus() -> list[tuple[str, str]]:
    """This machine's NVIDIA GPUs as (index, "name, UUID"); empty without a driver."""
    import subprocess  # here: a worker imports this module too, and lists nothing

    command = ["nvidia-smi", "--query-gpu=index,name,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode:
        return []
    rows = [line.split(", ", 1) for line in answer.stdout.splitlines() if ", " in line]
    return [(index, rest) for index, rest in rows]


def identified_gpus() -> tuple[str, ...]:
    """The same, by names that mean one device on the whole host: UUIDs where they are known.

    A container or a job step that may use a single GPU calls it "0", whichever it is.
    """
    uuids = {index: rest.rpartition(", ")[2] for index, rest in list_gpus()}
    return tuple(uuids.get(device, device) for device in visible_gpus())


def environment(slot: Slot, pinning: Pinning) -> dict[str, str]:
    """The variables that show a rank its GPUs; none of them on a host without GPUs."""
    if not slot.host_gpus:
        return {}
    shown = slot.gpus if pinning == "mask" else slot.host_gpus
    found = {
        "CUDA_VISIBLE_DEVICES": ",".join(shown),
        "HOROVOD_RUNNER_DEVICE": str(shown.index(slot.gpus[0])),
    }
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        # nvidia-smi and Spark's discovery script number the devices in this order.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return found


def pin_on_import() -> None:
    """Make this rank's device current as soon as torch or TensorFlow is imported here."""
    device = os.environ.get("HOROVOD_RUNNER_DEVICE")
    if device is None:
        return
    import wrapt

    index = int(device)
    wrapt.register_post_import_hook(lambda torch: pin_torch(torch, index), "torch")
    wrapt.register_post_import_hook(lambda tf: pin_tensorflow(tf, index), "tensorflow")


def pin_torch(torch: Any, index: int) -> None:
    """Make a GPU torch's current one."""
    if torch.version.cuda is None:
        return
    # Queued until CUDA starts: an import must not take GPU memory or forbid a later fork.
    torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))


def pin_tensorflow(tensorflow: Any, index: int) -> None:
    """Make a GPU the only one that TensorFlow sees.

    Raises:
        RuntimeError: TensorFlow has used them already.
    """
    devices = tensorflow.config.list_physical_devices("GPU")
    if index < len(devices):
        tensorflow.config.set_visible_devices(devices[index], "GPU")
