"""Reads how busy GPUs are, by NVIDIA's library NVML; needs the package nvidia-ml-py.

Without the package, or without a driver, nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

# NVML's nvmlClocksEventReasons: of the hardware (heat, power brake), and heat by the driver. A
# GPU at its power limit (0x4) is as fast as it can be.
_SLOWED: Final = 0x8 | 0x20 | 0x40 | 0x80


class GpuUse(NamedTuple):
    """The use of some GPUs at a moment; see the attributes of ``wire.measurements.Machine``."""

    readable: int = 0
    busy: float = 0.0
    memory: int = 0
    memory_limit: int = 0
    slowed: int = 0


class GpuMeter:
    """Reads some GPUs.

    Args:
        gpus: each an index or a UUID, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if not gpus:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # the package, the driver or a GPU is missing, or they do not fit
            return
        self._nvml = pynvml
        for gpu in gpus:
            with suppress(pynvml.NVMLError, ValueError, StopIteration):
                self._handles.append(self._handle(gpu))

    def _handle(self, gpu: str) -> Any:
        nvml = self._nvml
        if gpu.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(gpu)
        # CUDA also accepts the beginning of a UUID.
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return next(each for each in handles if nvml.nvmlDeviceGetUUID(each).startswith(gpu))

    def read(self) -> GpuUse:
        """Measure them now."""
        nvml = self._nvml
        count = memory = limit = slowed = 0
        shares: list[float] = []
        for handle in self._handles:
            # An old pynvml lacks the last function.
            with suppress(nvml.NVMLError, AttributeError):
                found = nvml.nvmlDeviceGetMemoryInfo(handle)
                count, memory, limit = count + 1, memory + found.used, limit + found.total
                # Slices of a GPU (MIG) do not tell the rest.
                shares.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                slowed += bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & _SLOWED)
        return GpuUse(count, sum(shares) / len(shares) if shares else 0.0, memory, limit, slowed)
