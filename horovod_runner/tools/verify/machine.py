"""Finds GPUs, frameworks, Horovod's libraries and packages, which checks need."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import msgspec

from horovod_runner.errors import GpuError
from horovod_runner.host import control_groups, gpus
from horovod_runner.tools.horovod_build import toolchain

#: Packages that some checks need, by the name of the import, and how they are installed.
PACKAGES: Final = {
    "keras": "pip install 'horovod_runner[keras]'",
    "pyarrow": "pip install 'horovod_runner[data]'",
    "pynvml": "pip install 'horovod_runner[gpu]'",
}


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that the checks may use."""

    device: str  # as in CUDA_VISIBLE_DEVICES
    uuid: str = ""  # as nvidia-smi shows it, "GPU-..."; empty if it is not known
    name: str = ""


class ThisMachine(msgspec.Struct, frozen=True):
    """A machine as far as checks ask."""

    gpus: tuple[Gpu, ...] = ()  # in the order of CUDA_VISIBLE_DEVICES
    frameworks: tuple[toolchain.Framework, ...] = ()  # those that are installed
    packages: tuple[str, ...] = ()  # those of PACKAGES that can be imported
    nccl: str = ""  # its version
    host: str = ""
    cores: int = 1  # how many this process may use

    def has_nccl(self, name: str) -> bool:
        """Whether Horovod reduces a framework's tensors on this machine's GPUs."""
        found = next((f for f in self.frameworks if f.name == name and not f.error), None)
        if found is None or found.horovod is None or not found.cuda:
            return False
        return bool(self.gpus) and "nccl" in found.horovod.built


def look(used: Sequence[Gpu], frameworks: Sequence[str]) -> ThisMachine:
    """Look at this machine, of which checks may use some GPUs, and import some frameworks."""
    nccl = toolchain.find_nccl()
    return ThisMachine(
        gpus=tuple(used),
        frameworks=tuple(toolchain.find_frameworks(frameworks, with_horovod=True)),
        packages=tuple(name for name in PACKAGES if find_spec(name) is not None),
        nccl=nccl.version if nccl else "",
        host=platform.node(),
        cores=control_groups.available_cores(),
    )


def visible() -> tuple[Gpu, ...]:
    """The GPUs that this process may use."""
    listed = {}
    for index, description in gpus.list_gpus():
        name, _, uuid = description.rpartition(", ")
        listed[index] = listed[uuid] = Gpu(index, uuid, name)
    found = []
    for device in gpus.visible_gpus():
        # CUDA also accepts the beginning of a UUID.
        known = listed.get(device) or next(
            (gpu for key, gpu in listed.items() if key.startswith(device) and not key.isdigit()),
            Gpu(device),
        )
        found.append(Gpu(device, known.uuid, known.name))
    return tuple(found)


def first(found: Sequence[Gpu], count: int | None) -> tuple[Gpu, ...]:
    """The first of some GPUs, or all; raises GpuError if there are fewer."""
    if count is None:
        return tuple(found)
    if not 0 <= count <= len(found):
        raise GpuError(
            f"--gpus {count}: this process may use {len(found)} GPUs. Give a number from 0 to "
            f"{len(found)}, or leave it out. nvidia-smi and CUDA_VISIBLE_DEVICES say which there "
            "are."
        )
    return tuple(found[:count])


def environment(used: Sequence[Gpu], all_visible: Sequence[Gpu]) -> dict[str, str]:
    """Variables that show the checks some of the visible GPUs.

    With nothing to hide they are only the order of the GPUs, if the user has not chosen one. It is
    that of nvidia-smi, so that its UUIDs name the devices.
    """
    variables = {}
    if "CUDA_DEVICE_ORDER" not in os.environ:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if len(used) < len(all_visible) or not used:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.device for gpu in used)
    return variables
