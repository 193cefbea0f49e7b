"""Refuses tensors on a GPU where Horovod has no NCCL: its C++ code would abort the rank."""

from __future__ import annotations

from typing import Any

from horovod_runner.errors import GpuError
from horovod_runner.worker.imports.patches import instead_of


def refuse_without(ops: Any) -> None:
    """Refuse them in all collectives; called with the module ``horovod.torch.mpi_ops``."""

    @instead_of(ops, "_check_function")
    def check(plain: Any, function_factory: Any, tensor: Any) -> Any:
        if tensor.is_cuda and not ops.nccl_built():
            raise GpuError(
                f"a tensor on {tensor.device} was passed to Horovod, which was built without NCCL "
                "and reduces on CPUs only. Run horovod-runner install --gpu --rebuild, which says "
                "what is missing; or train on CPUs with gpus_per_rank=0; or pass tensor.cpu()"
            )
        return plain(function_factory, tensor)
