"""The exceptions of this package.

    HorovodRunnerError (RuntimeError)
    ├── SlotError          the cluster has too few slots
    ├── DataError          a dataset cannot be read, packed or made into tensors
    ├── PredictionError    a model failed on a batch, or its outputs do not fit
    ├── CheckpointError    a checkpoint cannot be read, or its folder cannot be used
    ├── GpuError           a host has too few GPUs for its ranks
    ├── SerializationError main or its arguments cannot be sent to the ranks
    ├── LaunchError        the ranks could not be started
    ├── CancelledError     ``HorovodRunner.cancel`` ended the run
    ├── RanksChangedError  the run goes on with another number of ranks; ends ``main`` at a commit
    ├── HangError          the ranks made no progress for ``hang_timeout`` seconds
    ├── SyncError          the ranks' weights differ (``weight_check``)
    ├── RankFailedError    a rank ended badly; also the ``__cause__`` of a user's own exception
    ├── ChannelError       the driver's message channel could not be opened
    └── InstallError       Horovod could not be built or installed

Wrong arguments raise ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from typing import Any

from horovod_runner.common.text import has_password, without_password

# Texts by which Horovod, torch.distributed, XGBoost and LightGBM say that another rank went away.
_SECONDARY_TEXTS = (
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "connectFullMesh failed",
    "Connection was likely closed",
    "remote process exiting",
    "NCCL communicator was aborted",
    "collective/result.cc",
)
_SECONDARY_TYPES = (
    "HorovodInternalError",
    "UnknownError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "RuntimeError",
    "XGBoostError",
    "LightGBMError",
)


class HorovodRunnerError(RuntimeError):
    """Base class of this package's errors. Their texts hold no passwords of URLs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_password(arg) if isinstance(arg, str) else arg for arg in args))


class SlotError(HorovodRunnerError):
    """The cluster has fewer slots than the run has ranks, or runs in a mode without slots."""


class DataError(HorovodRunnerError):
    """A dataset cannot be read, packed or made into tensors."""


class PredictionError(HorovodRunnerError):
    """A model failed on a batch of rows, or its outputs do not fit the wanted columns."""


class CheckpointError(HorovodRunnerError):
    """A checkpoint cannot be read, or its folder cannot be used."""


class GpuError(HorovodRunnerError):
    """A host has fewer GPUs than its ranks need."""


class SerializationError(HorovodRunnerError):
    """``main``, its arguments or its return value cannot be pickled."""


class LaunchError(HorovodRunnerError):
    """The ranks could not be started."""


class CancelledError(HorovodRunnerError):
    """Another thread called ``HorovodRunner.cancel``."""


class RanksChangedError(HorovodRunnerError):
    """The run goes on with another number of ranks: ``main`` ends here, and is called again.

    ``commit`` and ``save_checkpoint`` raise it in ranks of an elastic run. Do not catch it.
    """


class HangError(HorovodRunnerError):
    """The ranks made no progress for ``hang_timeout`` seconds; the text says who waits where."""


class SyncError(HorovodRunnerError):
    """The ranks' weights differ; the text names the first rank and variable that differ."""


class ChannelError(HorovodRunnerError):
    """The driver's message channel could not be opened."""


class InstallError(HorovodRunnerError):
    """Horovod could not be built or installed; the text is one line that says what is missing."""


class RankFailedError(HorovodRunnerError):
    """A rank ended badly.

    Raised when the rank died without a Python exception (an exit code, a signal); otherwise it is
    the ``__cause__`` of the user's own exception and carries the remote traceback.

    Attributes:
        rank: the first rank that failed.
        host: the host it ran on.
        pid: its process id there.
        exit_code: its exit code, negative for a signal as in :mod:`subprocess`; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str = "",
        pid: int | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class without its keyword arguments.
        fields = {"rank": self.rank, "host": self.host, "pid": self.pid}
        return _rebuild_rank_failed, (str(self), {**fields, "exit_code": self.exit_code})


def _rebuild_rank_failed(message: str, fields: dict[str, Any]) -> RankFailedError:
    return RankFailedError(message, **fields)


def forget_passwords(error: BaseException) -> None:
    """Cut off what caused an error of this package where that names the password of a URL.

    A traceback shows the whole chain, and the errors of stores often quote the URL.
    """
    each: BaseException | None = error
    for _ in range(10):  # an error may be its own cause
        if not isinstance(each, HorovodRunnerError):
            return
        cause = each.__cause__ or each.__context__
        if cause is not None and has_password(str(cause)):
            each.__cause__ = cause = None  # which also hides the context
        each = cause


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another rank went away."""
    return type(error).__name__ in _SECONDARY_TYPES and any(
        mark in str(error) for mark in _SECONDARY_TEXTS
    )
