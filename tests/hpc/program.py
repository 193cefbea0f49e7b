"""A program of four ranks, of which two train; the tests start it with every launcher.

    mpirun -np 4 python program.py [train|two-hosts|fail|exit]

The program checks its results. The last line of every rank is "rank N: ok".
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from horovod_runner import DataError, RankFailedError, spmd

ROWS = (5, 0, 40_000, 3)  # texts of more than a frame of the mesh
STARTS = np.cumsum([0, *ROWS])
SHARES = ((0, 20_004), (20_004, 40_008))
LABEL = np.dtype([("id", "i8"), ("tag", "S3")])


def part(begin: int, end: int) -> dict[str, Any]:
    """Return rows ``begin`` to ``end`` of the whole data; rank r passes those from STARTS[r] on."""
    row = np.arange(begin, end)
    return {
        "images": (row[:, None, None] % 251 * np.ones((1, 3, 4))).astype("u1"),
        "strided": np.asfortranarray(row[:, None] * np.ones((1, 2))),
        "names": np.array([f"row {i}" for i in row], dtype="<U9"),
        "days": row.astype("M8[D]"),
        "label": np.array([(i, b"ab") for i in row], dtype=LABEL),
        "flag": row % 2 == 0,
        "nothing": np.empty((len(row), 0)),
        "objects": np.array([{"row": int(i)} for i in row], dtype=object),
        "tables": (
            pd.DataFrame({"a": row, "s": row.astype(str)}, index=row * 10),
            pd.Series(row, name="y", dtype="Int64"),
            pa.table({"a": row, "s": pa.array(row.astype(str)).dictionary_encode()}),
            pa.RecordBatch.from_pydict({"a": row}),
        ),
    }


def check(got: dict[str, Any], begin: int, end: int) -> None:
    """Check that a rank received rows ``begin`` to ``end``."""
    expected = part(begin, end)
    for name in expected.keys() - {"tables"}:
        assert got[name].dtype == expected[name].dtype, name
        assert got[name].shape == expected[name].shape, name
        assert (got[name] == expected[name]).all(), name
    frame, series, table, batch = got["tables"]
    pd.testing.assert_frame_equal(frame, expected["tables"][0])
    pd.testing.assert_series_equal(
        series.reset_index(drop=True), expected["tables"][1].reset_index(drop=True)
    )
    assert table.to_pydict() == expected["tables"][2].to_pydict()
    assert isinstance(batch, pa.RecordBatch)
    assert batch.to_pydict() == expected["tables"][3].to_pydict()


def train(x: np.ndarray[Any, Any]) -> None:
    """Check that Horovod runs on two ranks and reduces."""
    import horovod.torch as hvd
    import torch

    assert hvd.is_initialized()
    assert hvd.size() == 2
    total = hvd.allreduce(torch.tensor([float(len(x))]), op=hvd.Sum)
    assert total.item() == sum(ROWS), total


def check_mismatch(rank: int) -> None:
    """Check that a different dtype on one rank raises an error on all ranks."""
    said = ""
    try:
        spmd.prepare_data(np.zeros(3, "f4" if rank == 3 else "f8"))
    except DataError as error:
        said = str(error)
    assert "ranks 0, 3" in said


def main(mode: str) -> None:
    """Run the program; ``mode`` is "train", "two-hosts", or a failure to cause."""
    trainers = (0, 2) if mode == "two-hosts" else (0, 1)
    spmd.start("torch", ranks_per_host=1 if mode == "two-hosts" else 2)
    rank = spmd.rank()
    trains = rank in trainers
    assert spmd.size() == 4
    assert spmd.initialized() == trains
    assert not spmd.is_cuda_available()
    check_mismatch(rank)
    rows = part(STARTS[rank], STARTS[rank + 1])
    if rank == 0:
        rows["names"] = rows["names"].astype("<U5")  # NumPy makes the width fit the rank's rows
    received = spmd.prepare_data(rows)
    check(received, *(SHARES[trainers.index(rank)] if trains else (0, 0)))
    if mode == "exit":
        if rank == 0:
            sys.exit(0)  # without end()
        if trains:
            train(received["images"])
        spmd.end()
    # Rank 0 already has its share; only rows of the other ranks move.
    numbers = [np.zeros(2), np.zeros(0), np.ones(1), np.ones(1)][rank]
    still, frame = spmd.prepare_data([numbers, pd.DataFrame({"a": numbers})])
    expected = dict(zip(trainers, ([0, 0], [1, 1]), strict=True)).get(rank, [])
    assert still.tolist() == frame["a"].tolist() == expected
    try:
        if (mode, rank) == ("fail", 1):
            raise ValueError("the error of rank 1")
        if trains:
            train(received["images"])
            time.sleep(1)  # the rest of the training; the other ranks wait in end()
    finally:
        before = time.process_time()
        try:
            spmd.end()
            spmd.end()
            # A rank that waits a second uses almost no CPU time.
            assert trains or time.process_time() - before < 0.5
        except RankFailedError as error:
            print(f"rank {rank}: end() raised: {error}", flush=True)
            raise
    assert not spmd.initialized()
    import horovod.torch as hvd

    assert not hvd.is_initialized()
    # A second training, on all ranks.
    spmd.start("torch")
    assert hvd.size() == 4
    (x,) = spmd.prepare_data((rows["images"],))
    assert len(x) == 10_002
    spmd.end()
    print(f"rank {rank}: ok", flush=True)


if __name__ == "__main__":
    # A fifth of an import of torch would be a search for garbage, and at the end one would take a
    # second. spmd.start() turns it off for its own import alone.
    gc.disable()
    atexit.register(gc.freeze)
    main(sys.argv[1] if len(sys.argv) > 1 else "train")
