"""Sums of the metrics of PyTorch over the rows of a rank, and their means over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

_ROWS = "rows of all ranks"


class Sums:
    """Sums of metrics over this rank's rows, on its device."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self.rows = 0.0  # how many rows they are of
        self._is_on_cpu = device.type == "cpu"
        # A sum on the device does not make the loop wait for it; on a CPU a number is cheaper.
        self._sums: dict[str, Any] = {
            name: 0.0 if self._is_on_cpu else torch.zeros((), dtype=torch.float64, device=device)
            for name in names
        }

    def add(self, name: str, value: Any, rows: float) -> None:
        """Add a mean over rows, without waiting for a GPU."""
        if self._is_on_cpu or not isinstance(value, torch.Tensor):
            number = value.item() if isinstance(value, torch.Tensor) else float(value)
            self._sums[name] += number * rows
        else:
            self._sums[name].add_(value.reshape(()), alpha=rows)

    def totals(self) -> dict[str, float]:
        """The sums of all ranks, and the number of their rows, by name."""
        here = torch.tensor([self.rows, *map(float, self._sums.values())], dtype=torch.float64)
        if hvd.size() > 1:
            here = hvd.allreduce(here, op=hvd.Sum, name="horovod_runner.training.metrics")
        return dict(zip((_ROWS, *self._sums), here.tolist(), strict=True))

    def means(self) -> dict[str, float]:
        """The means over the rows of all ranks."""
        totals = self.totals()
        rows = totals.pop(_ROWS)
        return {name: total / rows for name, total in totals.items()}

    def continue_with(self, totals: Mapping[str, float]) -> None:
        """Add sums of an earlier run; on one rank only, for they are those of all."""
        for name, total in totals.items():
            if name == _ROWS:
                self.rows += total
            else:
                self._sums[name] += total
