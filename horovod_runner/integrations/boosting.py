"""XGBoost and LightGBM between the ranks of a run: each connects its own collectives.

    with xgboost_ranks():
        model = xgb.train(params, xgb.DMatrix(x, y))

    model = lgb.train({**params, **lightgbm_ranks()}, lgb.Dataset(x, y))

Nothing of XGBoost or LightGBM is imported before a function is called.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np

from horovod_runner.host.network import address_of
from horovod_runner.wire.collectives import SmallCollectives, connected, connected_library
from horovod_runner.worker import context
from horovod_runner.worker.agreement import agree
from horovod_runner.worker.imports.patches import instead_of


@contextmanager
def xgboost_ranks() -> Iterator[None]:
    """Connect XGBoost on all ranks while the block runs: ``xgb.train`` uses the rows of all.

    Call it on every rank. Rank 0 starts XGBoost's tracker, and all ranks get its address. It calls
    ``hvd.init()`` if ``main`` has not connected the ranks. Make each ``DMatrix`` inside the block.
    With one rank, and outside a run, it does nothing.

    Raises:
        ImportError: xgboost is not installed; or no Horovod, and ``main`` has not connected the
            ranks by ``torch.distributed``.
    """
    rank = context.current()
    if rank is None or rank.size == 1:
        yield
        return
    from xgboost.collective import CommunicatorContext
    from xgboost.tracker import RabitTracker

    _connected()
    tracker, arguments = None, {}
    if rank.rank == 0:
        tracker = RabitTracker(rank.size, os.environ["MASTER_ADDR"], sortby="task")
        tracker.start()
        arguments = tracker.worker_args()
    # XGBoost sorts tasks as text; its ranks are then those of the run.
    with CommunicatorContext(**agree(arguments), dmlc_task_id=f"{rank.rank:06}"):
        yield
    if tracker is not None:
        tracker.wait_for()


def lightgbm_ranks() -> dict[str, Any]:
    """Return the parameters with which LightGBM trains on the rows of all ranks.

    Call it on every rank, once for each training, and add the parameters to those of
    ``lgb.train``. Each rank picks a free port, and all ranks get the addresses. It calls
    ``hvd.init()`` if ``main`` has not connected the ranks. With these parameters LightGBM's early
    stopping sees the metrics averaged over the rows of all ranks: all stop after the same round.

    Returns:
        ``machines``, ``num_machines``, ``local_listen_port``, ``pre_partition``, and
        ``tree_learner="data"``. With one rank, and outside a run, nothing.

    Raises:
        ImportError: no Horovod is installed, and ``main`` has not connected the ranks by
            ``torch.distributed``.
    """
    rank = context.current()
    if rank is None or rank.size == 1:
        return {}
    _stop_together()
    address = address_of(os.environ["GLOO_SOCKET_IFNAME"])
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    rows = _connected().gather([int(ipaddress.IPv4Address(address)), port], "lightgbm")
    machines = ",".join(f"{ipaddress.IPv4Address(host)}:{at}" for host, at in rows)
    return {
        "tree_learner": "data",
        "pre_partition": True,
        "num_machines": rank.size,
        "machines": machines,
        "local_listen_port": port,
    }


def _stop_together() -> None:
    """Let LightGBM's early stopping see the metrics of all ranks.

    LightGBM evaluates a rank's own rows. Where one rank stops, the others lose the connection.
    """
    import lightgbm

    stopping: Any = type(lightgbm.early_stopping(1))
    if stopping is FunctionType or hasattr(stopping.__call__, "__wrapped__"):
        return  # an old version; or it is done

    @instead_of(stopping, "__call__")
    def call(plain: Any, self: Any, env: Any) -> None:
        if env.evaluation_result_list and env.params.get("num_machines", 1) > 1:
            env.evaluation_result_list[:] = _means_over_ranks(env)
        plain(self, env)


def _means_over_ranks(env: Any) -> list[Any]:
    """The results of an evaluation, averaged over the rows of all ranks."""
    model, results = env.model, env.evaluation_result_list
    sets = dict(zip(model.name_valid_sets, model.valid_sets, strict=True))
    rows = np.array([sets.get(name, model.train_set).num_data() for name, *_ in results], float)
    values = rows * [value for _, _, value, *_ in results]
    sums, counts = _connected().add(np.stack([values, rows]))
    changed = []
    for each, mean in zip(results, sums / counts, strict=True):
        values = (*each[:2], float(mean), *each[3:])
        changed.append(values if type(each) is tuple else type(each)(*values))
    return changed


def _connected() -> SmallCollectives:
    """The collectives of main's library, or of Horovod, which is initialized then."""
    if connected_library() is None:
        import horovod.torch as hvd

        hvd.init()
    return connected()
