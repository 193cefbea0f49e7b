"""Lightning's own strategies in a run: the Trainer takes the ranks that there are.

Imports no Lightning and no Horovod: an import hook calls it in any rank that imports Lightning.
"""

from __future__ import annotations

import os
from typing import Any

from horovod_runner.worker import context
from horovod_runner.worker.imports.patches import instead_of

# Strategies that start processes of their own, or use one process.
_OWN_PROCESSES = ("auto", "ddp_spawn", "ddp_fork", "ddp_notebook", "single_device", "horovod")


def patch_trainer(module: Any) -> None:
    """Let the Trainer use all ranks; called with the module of Lightning's Trainer."""

    @instead_of(module.Trainer, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **{**devices_of_ranks(options.get("strategy", "auto")), **options})


def devices_of_ranks(strategy: Any) -> dict[str, int]:
    """The ``devices`` and ``num_nodes`` of a Trainer with a strategy for several processes.

    Empty on one rank, outside a run, if hosts have different numbers of ranks, and for other
    strategies.
    """
    rank = context.current()
    name = strategy if isinstance(strategy, str) else getattr(strategy, "strategy_name", "")
    is_parallel = isinstance(strategy, str) or hasattr(strategy, "parallel_devices")
    if rank is None or rank.size == 1 or not is_parallel or name in _OWN_PROCESSES:
        return {}
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": here, "num_nodes": rank.size // here} if rank.size % here == 0 else {}
