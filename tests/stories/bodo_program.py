"""A Bodo program in the style of ``bodo.dl``: parallel tables, then training on some ranks.

mpiexec -n 4 python bodo_program.py
"""

from __future__ import annotations

from typing import Any

import bodo
import numpy as np
import pandas as pd

from horovod_runner import spmd

ROWS = 4001


@bodo.jit(spawn=False)
def load(rows: int) -> Any:
    """Load this rank's rows; the filter leaves ranks with different numbers of rows."""
    frame = pd.DataFrame({"row": np.arange(rows), "x": np.arange(rows) % 17 * 0.25})
    frame = frame[frame.row % 3 != 0]
    return frame.row.values, frame.x.values


def main() -> None:
    """Load with Bodo, train with Horovod, and gather the result with Bodo."""
    row, x = load(ROWS)
    spmd.start("torch", ranks_per_host=2)
    row, x = spmd.prepare_data((row, x))
    weight = 0.0
    if spmd.initialized():
        import horovod.torch as hvd
        import torch

        expected = np.array_split(np.flatnonzero(np.arange(ROWS) % 3), hvd.size())[hvd.rank()]
        assert row.tolist() == expected.tolist()
        assert np.array_equal(x, row % 17 * 0.25)
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        inputs = torch.tensor(x, dtype=torch.float32)[:, None]
        for _ in range(200):
            optimizer.zero_grad()
            (model(inputs) - 3 * inputs).square().mean().backward()
            optimizer.step()
        weight = model.weight.item()
    spmd.end()
    weights = bodo.allgatherv(np.array([weight]))
    print(f"rank {bodo.get_rank()}: weights {[round(float(weight), 2) for weight in weights]}")


if __name__ == "__main__":
    main()
