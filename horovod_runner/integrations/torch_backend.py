"""The backend "hvd" of torch.distributed: collectives of CPU tensors over the MPI of a run.

    torch.distributed.init_process_group("hvd")

In a rank ``init_process_group()`` without a backend takes it too, for CPU tensors; GPU tensors stay
with NCCL. ``HOROVOD_RUNNER_TORCH_BACKEND=gloo`` in the run's ``env`` leaves the choice to torch.

The groups are written in C++ and compiled beside Horovod (horovod_build/overlay/horovod/torch/
process_group.cc). In a run without MPI, "hvd" is torch's gloo. Where torch has changed so much that
they did not compile, "hvd" raises an error, and the default is gloo.

A program whose ranks were started by something else, such as mpirun, calls :func:`register` first.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from multiprocessing import parent_process
from typing import Any, Final

from horovod_runner.common.text import ranks_text
from horovod_runner.worker.api import current_rank, log_to_driver
from horovod_runner.worker.imports.patches import instead_of

NAME: Final = "hvd"
VARIABLE: Final = "HOROVOD_RUNNER_TORCH_BACKEND"
_GLOO: Final = "gloo"
_LIBRARY: Final = "horovod.torch.process_group"
# Where a launcher has told MPI about the ranks; Open MPI's and PMI's variables.
_RANKS_OF_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_LARGEST_TAG: Final = 32767  # that every MPI allows


def register(c10d: Any = None) -> None:
    """Make "hvd" a backend of torch.distributed, and the default for CPU tensors.

    Ranks do it when they import torch.

    Args:
        c10d: the module torch.distributed.distributed_c10d; None imports it.
    """
    if c10d is None:
        c10d = import_module("torch.distributed.distributed_c10d")
    if NAME in c10d.Backend.backend_list:
        return
    make_group = partial(_make_group, c10d)
    c10d.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
    original = c10d.init_process_group

    @instead_of(c10d, "init_process_group")
    def init_process_group(plain: Any, *args: Any, **kwargs: Any) -> None:
        given = signature(plain).bind(*args, **kwargs).arguments
        # A process that a rank has started, as a DataLoader does, is not a rank of MPI.
        if given.get("backend") is None and parent_process() is None:
            given["backend"] = _default_backend()
        plain(**given)

    @instead_of(c10d, "monitored_barrier")
    def monitored_barrier(
        plain: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        group = c10d._get_default_group() if group is None else group
        if c10d._rank_not_in_group(group) or _name_of(c10d, group) != NAME:
            plain(group, timeout, wait_all_ranks)
        else:
            _monitored_barrier(c10d, group, _timeout(timeout or c10d.default_pg_timeout))

    @instead_of(c10d, "destroy_process_group")
    def destroy_process_group(plain: Any, group: Any = None) -> None:
        is_all = group in (None, c10d.GroupMember.WORLD)
        groups = [*c10d._world.pg_map] if is_all else [group]
        plain(group)
        now = time.monotonic()
        _destroyed[:] = [each for each in _destroyed if now - each[0] < _KEPT_SECONDS]
        _destroyed.extend((now, each) for each in groups)

    package = sys.modules.get("torch.distributed")
    # A package that is still being imported takes the names later.
    if getattr(package, "init_process_group", None) is original:
        for patched in (init_process_group, monitored_barrier, destroy_process_group):
            setattr(package, patched.__name__, patched)


def patch_accelerate(state: Any) -> None:
    """Make Accelerate, and with it the Trainer, take the default backend on CPUs.

    It asks for gloo by name, and refuses other names. Called with the module accelerate.state.
    """

    @instead_of(state.PartialState, "_prepare_backend")
    def prepare_backend(plain: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(plain).bind(*args, **kwargs).arguments.get("backend")
        backend, kind = plain(*args, **kwargs)
        if backend == _GLOO and given in (None, NAME):
            backend = given or _default_backend() or backend
        return backend, kind


def fault() -> str:
    """What keeps the backend of this Horovod from loading, for a sentence about it.

    Empty if it loads, and if Horovod was built without it, as it is without MPI.
    """
    if not _is_built():
        return ""
    try:
        why = import_module(_LIBRARY).missing
    except ImportError as error:
        return f"it does not load ({error})"
    return f"it did not compile ({why})" if why else ""


def _is_built() -> bool:
    return find_spec(_LIBRARY) is not None


def _default_backend() -> str | None:
    """The backend for ``backend=None``; None leaves it to torch."""
    import torch

    if os.environ.get(VARIABLE, NAME) != NAME or _missing():
        return None
    if broken := fault():
        _say_gloo(f"this Horovod lacks it: {broken}")
        return None
    if torch.cuda.is_available():
        return f"cpu:{NAME},cuda:nccl"
    return NAME if torch._C._get_accelerator().type == "cpu" else None


def _missing() -> str:
    """Why "hvd" is gloo in this process, for a notice; empty if it is not."""
    controller = os.environ.get("HOROVOD_CONTROLLER")
    if controller == "gloo" or (not controller and not any(map(os.environ.get, _RANKS_OF_MPI))):
        return "the ranks do not use MPI"
    try:
        import_module("horovod.torch")
    except ImportError as error:
        return f"horovod.torch does not import ({error})"
    if not _is_built():
        return "Horovod was built without MPI or by an older horovod_runner"
    return ""


def _make_group(c10d: Any, options: Any, _: Any) -> Any:
    rank, size, timeout = options.group_rank, options.group_size, _timeout(options.timeout)
    if missing := _missing():
        _say_gloo(missing)
        group = c10d.ProcessGroupGloo(options.store, rank, size, timeout=timeout)
        group._set_sequence_number_for_group()
        return group
    if broken := fault():
        import torch

        raise RuntimeError(
            f'torch.distributed\'s backend "{NAME}" is missing in this Horovod: {broken}. Its C++ '
            f"code may not fit torch {torch.__version__} yet. Use another backend, such as gloo, "
            "or install a later horovod_runner and run: horovod-runner install --rebuild"
        )
    library = import_module(_LIBRARY)
    own = library.mpi_rank()
    ranks = _meet(options.store, rank=rank, size=size, timeout=timeout, own=own)
    tag = zlib.crc32(str(options.group_id).encode()) % _LARGEST_TAG
    _leave_at_exit(c10d)
    return library.process_group(options.store, rank, ranks, timeout.total_seconds(), tag)


@cache  # once, not for each group
def _say_gloo(missing: str) -> None:
    if current_rank() == 0:
        log_to_driver(
            f'HorovodRunner: torch.distributed\'s backend "{NAME}" is gloo in this run, because '
            f"{missing}. See docs/howto/torch_distributed.md"
        )


def _timeout(timeout: Any) -> timedelta:
    """A timeout of torch, which its versions pass as a timedelta or in seconds."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def _meet(
    store: Any, *, rank: int, size: int, timeout: timedelta, own: int, barrier: bool = False
) -> list[int]:
    """Wait, asleep, for all ranks of a group; returns their ranks in MPI's world."""
    from torch.distributed import DistBackendError

    keys = [f"mpi_rank_{other}" for other in range(size)]
    store.set(keys[rank], str(own))
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        milliseconds = round(timeout.total_seconds() * 1000)
        what = "pass monitoredBarrier" if barrier else "come to the process group"
        raise DistBackendError(
            f"{ranks_text(missing).capitalize()} failed to {what} in {milliseconds} ms. All "
            f"{size} ranks of the group must call it; timeout= gives slow ones more time."
        ) from error
    return [int(store.get(key)) for key in keys]


def _name_of(c10d: Any, group: Any) -> str:
    import torch

    try:
        return str(group._get_backend(torch.device("cpu")).name())
    except RuntimeError:  # it has none for CPU tensors
        return str(c10d.get_backend(group))


def _monitored_barrier(c10d: Any, group: Any, timeout: timedelta) -> None:
    """A barrier that names the ranks that do not come, on every rank that does."""
    name = group.group_name
    number = _barriers[name] = _barriers.get(name, 0) + 1
    store = c10d._get_process_group_store(group)
    store = c10d.PrefixStore(f"monitored_barrier_{number}/", store)
    rank = group.rank()
    _meet(store, rank=rank, size=group.size(), timeout=timeout, own=rank, barrier=True)


# When groups were destroyed, and the groups. Where a DDP model has the last reference to a group of
# gloo, torch 2.13 may hang: it waits for the group's threads with Python's interpreter lock, and
# they wait for that lock to free the last collective. After a while they have freed it.
_destroyed: list[tuple[float, Any]] = []
_KEPT_SECONDS: Final = 60.0
_barriers: dict[str, int] = {}  # the number of monitored barriers by group


@cache  # once, not for each group
def _leave_at_exit(c10d: Any) -> None:
    """Have the groups destroyed at the end of the process, so that their last data are sent."""
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process and c10d.is_initialized():  # a fork has none of its threads
            c10d.destroy_process_group()

    atexit.register(leave)
