"""The options of a run: one frozen object, from the constructor to the rank.

A new option is a field of one of the groups here, and a line of code where it acts. The everyday
options at the top of :class:`Options` are arguments of HorovodRunner too, in `runner`. The command
line makes its options from the same fields: see `commands.run_options`. Long because an option and
its check stand together, here and nowhere else.
"""

from __future__ import annotations

import math
import os
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from horovod_runner.common.arguments import did_you_mean, meant, suggest_fields
from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.text import without_password

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

# Editors show the annotations below as they are written: there the choices stand for themselves.
StartedBy = Literal["spark", "slurm"]
Pinning = Literal["current", "mask"]
CpuCollectives = Literal["auto", "gloo", "mpi"]
Mode = Literal["min", "max"]

STALL_WARN_SECONDS: Final = 60  # after which Horovod itself warns
STALL_CHECK: Final = "HOROVOD_STALL_CHECK_TIME_SECONDS"


#: What a fork server may import: packages that look up nothing about a rank when they are imported,
#: and no modules of the user's. Lightning looks for its rank, but most of its time goes to what its
#: metrics import: matplotlib.pyplot, scipy.signal and transformers.
FRAMEWORKS: Final = frozenset(
    {
        "horovod.tensorflow",
        "horovod.torch",
        "keras",
        "matplotlib.pyplot",
        "numpy",
        "pandas",
        "pyarrow",
        "scipy",
        "scipy.signal",
        "sklearn",
        "tensorflow",
        "torch",
        "torch._dynamo",  # torch imports it for the first optimizer; takes longer than torch itself
        "torchvision",
        "transformers",
        "transformers.trainer",
    }
)

#: Names of options in other programs (Databricks' and Spark's distributors, horovod.spark,
#: torchrun) and in earlier versions of this package, with the names that they have here.
ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("num_proc", "num_processes", "nproc", "nproc_per_node", "nprocs"), "np"),
    **dict.fromkeys(("size", "num_workers", "num_ranks", "n"), "np"),
    "local_mode": "np=-2 (below 0: processes on this machine)",
    **dict.fromkeys(("use_gpu", "gpus", "num_gpus"), "gpus_per_rank"),
    **dict.fromkeys(("verbosity", "verbose", "log_verbosity"), "driver_log_verbosity"),
    **dict.fromkeys(("loggers", "logger", "callbacks"), "sinks"),
    **dict.fromkeys(("environment", "extra_env", "env_vars"), "env"),
    **dict.fromkeys(("retries", "max_retries", "max_failures", "restarts"), "max_restarts"),
    **dict.fromkeys(("min_np", "max_np", "min_num_proc", "max_num_proc"), "np=(2, 8) (a range)"),
    **dict.fromkeys(("store", "storage_path", "checkpoint_path"), "checkpoint_dir"),
    "keep": "num_to_keep",
    "best": "metric",
    **dict.fromkeys(("data_dir", "data_path"), "shared_dir"),
    "data_limit": "disk_limit",
    "controller": "cpu_collectives",
    **dict.fromkeys(("warm", "warm_start", "preload"), "preload_frameworks"),
    "check_sync": "weight_check",
    "start_timeout": "slot_timeout",
    "timeout": "ClusterConfig(slot_timeout=...) or DebugConfig(hang_timeout=...)",
    **dict.fromkeys(("timeouts", "time_limits"), "limits"),
}


def where_options_are() -> dict[str, str]:
    """How to write each option that belongs elsewhere, for those who name it in a wrong place."""
    written = {name: f"HorovodRunner({name}=...)" for name in _names(Options)}
    for group, kind in GROUPS.items():
        written |= {name: f"{group}={kind.__name__}({name}=...)" for name in _names(kind)}
    return written


# Before the classes: their defaults are checked as this module is loaded.


def _set(options: object, name: str, value: object) -> None:
    """Store a normalized value while a frozen object is being made."""
    object.__setattr__(options, name, value)


def _whole(name: str, value: object, least: int, note: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}; {note}")


def _modules(given: object) -> tuple[ModuleType, ...]:
    """The value of ``ship_modules``, checked."""
    if not isinstance(given, Iterable):
        raise TypeError(f"ship_modules must be a list of modules, not {given!r}")
    modules = tuple(given)
    for module in modules:
        if not isinstance(module, ModuleType):
            raise TypeError(
                f"ship_modules must hold modules, not {type(module).__name__}: "
                "import mymodule, then ship_modules=[mymodule]"
            )
    return modules


def _timeline_path(timeline: str | os.PathLike[str]) -> Path:
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"timeline={os.fspath(timeline)!r}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"timeline={os.fspath(timeline)!r} is a folder; name a file")
    return path


def _trace_folder(folder: str | os.PathLike[str]) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise TypeError(
            f"torch_profiler must be True, False or the path of a folder, not {folder!r}"
        )
    path = Path(folder).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"torch_profiler={os.fspath(folder)!r} is a file; name a folder")
    if not path.parent.is_dir():
        raise ValueError(f"torch_profiler={os.fspath(folder)!r}: there is no folder {path.parent}")
    return path


def choices_of(option: Field[Any]) -> tuple[Any, ...]:
    """The values that an option may have, if its annotation is a Literal; otherwise empty."""
    inside, bracket, rest = str(option.type).removeprefix("Literal[").partition("]")
    if not (bracket and str(option.type).startswith("Literal[")):
        return ()
    return (*literal_eval(f"[{inside}]"), *((None,) if "None" in rest else ()))


def _check_choices(options: Any) -> None:
    for option in fields(options):
        value, choices = getattr(options, option.name), choices_of(option)
        if choices and value not in choices:
            names = [each for each in choices if isinstance(each, str)]
            close = meant(value, names) if isinstance(value, str) else ""
            raise ValueError(
                f"{option.name} must be one of {', '.join(map(repr, choices))}, not {value!r}."
                f"{did_you_mean(repr(close) if close else '')}"
            )


@suggest_fields(ALIASES, where_options_are)
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints of a run are kept, and whether it may go on without them.

    Args:
        num_to_keep: how many checkpoints to keep; None keeps all of them.
        metric: keep the best ones by this metric, and the latest one in any case. None keeps the
            latest ones.
        mode: whether a low ("min") or a high ("max") value of ``metric`` is good.
        required: end the run with a CheckpointError at the first checkpoint that cannot be written.
            Otherwise it goes on, and says at its end which checkpoints are missing.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    num_to_keep: int | None = 3
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    required: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.num_to_keep is not None:
            _whole("num_to_keep", self.num_to_keep, 1, "None keeps all")
        if self.metric is not None and not isinstance(self.metric, str):
            kind = type(self.metric).__name__
            raise TypeError(f"metric must be the name of a metric, not {kind}")
        if self.mode != "min" and self.metric is None:
            raise ValueError(
                f"mode={self.mode!r} ranks checkpoints by a metric: name it, metric='accuracy'"
            )


@suggest_fields(ALIASES, where_options_are)
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows of a run's datasets are cached.

    Args:
        shared_dir: a folder that the driver and all executors share (NFS, ``/dbfs``, a Volume).
            DataFrames are written there once, and the batches do not depend on the number of
            ranks. None: their rows go to the ranks' own disks, unless all ranks are on this
            machine.
        disk_limit: how many bytes the datasets of a run may take on each host's disk. None: all
            that is free except 1 GiB (or a twentieth of the disk, if that is less).

    Raises:
        TypeError: ``disk_limit`` is not a whole number.
        ValueError: ``shared_dir`` is not a folder, or ``disk_limit`` is below 0.
    """

    shared_dir: str | os.PathLike[str] | None = None
    disk_limit: int | None = None

    def __post_init__(self) -> None:
        if self.shared_dir is not None:
            if not Path(self.shared_dir).is_dir():
                raise ValueError(
                    f"shared_dir does not exist or is not a directory: {self.shared_dir}"
                )
            _set(self, "shared_dir", Path(self.shared_dir).absolute())
        if self.disk_limit is not None:
            if isinstance(self.disk_limit, float) and self.disk_limit.is_integer():  # 50e9
                _set(self, "disk_limit", int(self.disk_limit))
            _whole("disk_limit", self.disk_limit, 0, "it is a number of bytes")


def _frameworks(given: object) -> bool | tuple[str, ...]:
    """The value of ``preload_frameworks``, checked; torch brings what its optimizers import."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(
            'preload_frameworks must be True, False or a list of names such as ["horovod.torch"], '
            f"not {given!r}"
        )
    names = tuple(given)
    for name in names:
        if name not in FRAMEWORKS:
            raise ValueError(
                f"preload_frameworks: {name!r} cannot be imported before a run."
                f"{did_you_mean(meant(str(name), FRAMEWORKS))} It can have "
                f"{', '.join(sorted(FRAMEWORKS))}"
            )
    if {"torch", "horovod.torch"} & {*names}:
        names = tuple(dict.fromkeys((*names, "torch._dynamo")))
    return names


@suggest_fields(ALIASES, where_options_are)
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How ranks are started, and what they reach each other with.

    Args:
        launcher: what starts the ranks of ``np`` >= 0: "spark", or "slurm" inside a Slurm
            allocation. Slurm needs no Spark; a slot is then a task of the allocation.
        spark: the Spark session for ``np`` >= 0; None takes the active one, or creates one.
        slot_timeout: seconds to wait for slots that a cluster may still bring up. None waits only
            in the first 30 s after the driver has joined the cluster, and on ``local[n]`` not at
            all. For slots that are busy a run waits in any case.
        resource_profile: what a task of the barrier job takes (Spark's stage-level scheduling, from
            4.0 on); None takes the application's settings.
        gpu_pinning: "current" shows a rank all GPUs of its host's ranks in local_rank order and
            makes its own the current device; "mask" shows it its own alone.
        cpu_collectives: what Horovod coordinates and reduces with on CPUs: "mpi" (MPICH), "gloo",
            or "auto", which is MPI where every host's Horovod has it.
        ship_modules: your own modules that the executors lack. Their functions and classes
            are pickled with ``main``.
        preload_frameworks: keep a process on each host that has imported the frameworks that
            ``main`` imported. The ranks of the next run are forked from it within milliseconds. It
            runs none of your code. It ends with the session, after ten minutes without a run, or
            when memory is short. Names of frameworks, such as ``["horovod.torch"]``: the first run
            is forked too, and each host imports them once for all of its ranks. Linux only; not
            under Slurm.
        limits: how long a run waits for each thing, from the first task to the last message.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    launcher: Literal["spark", "slurm"] = "spark"
    spark: SparkSession | None = field(default=None, repr=False)
    slot_timeout: float | None = None
    resource_profile: ResourceProfile | None = field(default=None, repr=False)
    gpu_pinning: Literal["current", "mask"] = "current"
    cpu_collectives: Literal["auto", "gloo", "mpi"] = "auto"
    ship_modules: Sequence[ModuleType] = ()
    preload_frameworks: bool | Sequence[str] = False
    limits: Limits = DEFAULTS

    def __post_init__(self) -> None:
        _check_choices(self)
        if not isinstance(self.limits, Limits):
            kind = type(self.limits).__name__
            raise TypeError(f"limits must be a Limits(...), not {kind}")
        if self.slot_timeout is not None and self.slot_timeout < 0:
            raise ValueError(f"slot_timeout is in seconds and cannot be {self.slot_timeout}")
        _set(self, "ship_modules", _modules(self.ship_modules))
        _set(self, "preload_frameworks", _frameworks(self.preload_frameworks))
        if self.preload_frameworks and self.launcher == "slurm":
            raise ValueError(
                "preload_frameworks keeps a process on each host for the next run, and Slurm "
                "ends all processes that a step leaves behind: leave it out with launcher='slurm'"
            )


@suggest_fields(ALIASES, where_options_are)
@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Which mistakes a run looks for, and what it records.

    Args:
        hang_timeout: seconds without progress after which the run ends with a HangError. An earlier
            warning says which ranks wait for which. None never ends it.
        weight_check: "start" compares some of the ranks' weights, and their learning rates, before
            and after the first steps of PyTorch's and Keras's optimizers, and at growing intervals
            (after 20, 40, 80 steps ...; 1, 2, 4 epochs ...), and warns where they differ. "epoch"
            also compares all weights after each epoch, and fails the run where they differ
            (:func:`horovod_runner.check_weights`). None compares nothing.
        report_ranks: whose calls of ``report`` are recorded: rank 0's, or "all".
        timeline: a file on this machine for Horovod's timeline.
        torch_profiler: record steps 10 to 20 of each rank with the profiler of torch, or of
            TensorFlow. True keeps the traces beside the run's record, for ``last_run.trace``; a
            path names the folder on this machine that they come to.
        profile: whether the ranks measure where their time goes, for ``last_run.diagnose()``.
        warn_pickle_bytes: warn above this pickled size of ``main`` and its arguments, and name the
            largest part.

    Raises:
        ValueError: an argument is out of range.
    """

    hang_timeout: float | None = 1800.0  # as torch.distributed waits for a collective
    weight_check: Literal["start", "epoch"] | None = "start"
    report_ranks: Literal[0, "all"] = 0
    timeline: str | os.PathLike[str] | None = None
    torch_profiler: bool | str | os.PathLike[str] = False
    profile: bool = True
    warn_pickle_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.hang_timeout is not None and not self.hang_timeout > 0:
            raise ValueError(
                f"hang_timeout is in seconds, above 0, and cannot be {self.hang_timeout}; None "
                "never ends a run"
            )
        if self.hang_timeout == math.inf:  # says the same as None
            _set(self, "hang_timeout", None)
        _check_choices(self)
        if self.timeline is not None:
            _set(self, "timeline", _timeline_path(self.timeline))
        if not isinstance(self.torch_profiler, bool):
            _set(self, "torch_profiler", _trace_folder(self.torch_profiler))


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a run; the arguments of :class:`~horovod_runner.HorovodRunner`."""

    np: int | tuple[int, int]
    driver_log_verbosity: Literal["all", "log_callback_only"] = "log_callback_only"
    gpus_per_rank: float | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    checkpoint_dir: str | os.PathLike[str] | None = None
    resume: bool = False
    max_restarts: int = 0
    grow_after: float = 60.0
    progress: bool = True
    sinks: Sequence[Any] = ()  # of horovod_runner.sinks.Sink
    checkpoint_config: CheckpointConfig = CheckpointConfig()
    data_config: DataConfig = DataConfig()
    cluster_config: ClusterConfig = ClusterConfig()
    debug_config: DebugConfig = DebugConfig()

    def __post_init__(self) -> None:
        self._check_np()
        _check_choices(self)
        gpus = self.gpus_per_rank
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus != int(gpus))):
            raise ValueError(
                f"gpus_per_rank must be 0, a fraction below 1, or a whole number, not {gpus}"
            )
        for name, value in self.env.items():  # the error shows no value: it may be secret
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env must map str to str; {name!r} maps to {type(value).__name__}")
        _set(self, "env", dict(self.env))
        self._check_checkpoint_dir()
        if isinstance(self.grow_after, bool) or not isinstance(self.grow_after, int | float):
            raise TypeError(f"grow_after is in seconds, not {self.grow_after!r}")
        if self.grow_after < 0:
            raise ValueError(f"grow_after is in seconds and cannot be {self.grow_after}")
        _whole("max_restarts", self.max_restarts, 0, "0 restarts nothing")
        _set(self, "sinks", tuple(self.sinks))
        for name, kind in GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                given = type(getattr(self, name)).__name__
                raise TypeError(f"{name} must be a {kind.__name__}(...), not {given}")

    def __repr__(self) -> str:
        given = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
        return without_password(f"Options({', '.join(given)})")

    def _check_np(self) -> None:
        np = tuple(self.np) if isinstance(self.np, list) else self.np
        numbers = np if isinstance(np, tuple) else (np,)
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            given = repr(np) if isinstance(np, tuple) else type(np).__name__
            raise TypeError(f"np must be an int, not {given}; or a pair of ints")
        if not isinstance(np, tuple):
            return
        if len(np) != 2:
            raise ValueError(f"np is a number or a pair, the least and the most ranks, not {np}")
        least, most = np
        if 0 in np or (least < 0) != (most < 0):
            raise ValueError(
                f"np={np}: both numbers are above 0, for Spark's or Slurm's tasks, or both below "
                "0, for processes on this machine"
            )
        if abs(least) > abs(most):
            raise ValueError(f"np={np}: the least number of ranks comes first, np={most, least}")
        _set(self, "np", np)

    @property
    def local(self) -> bool:
        """Whether the ranks are processes of this machine."""
        return self.most < 0

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change in the middle of a run."""
        return isinstance(self.np, tuple)

    @property
    def least(self) -> int:
        """The least number of ranks, as given: below 0 on this machine."""
        return self.np[0] if isinstance(self.np, tuple) else self.np

    @property
    def most(self) -> int:
        """The most ranks, as given."""
        return self.np[1] if isinstance(self.np, tuple) else self.np

    def _check_checkpoint_dir(self) -> None:
        folder = self.checkpoint_dir
        if folder is not None:
            if not isinstance(folder, (str, os.PathLike)):
                kind = type(folder).__name__
                raise TypeError(f"checkpoint_dir must be a path or a URL, not {kind}")
            if not os.fspath(folder):
                raise ValueError("checkpoint_dir is empty: name a folder or a URL, or leave it out")
            _set(self, "checkpoint_dir", os.fspath(folder))
        elif self.resume:
            raise ValueError(
                "resume=True resumes from the checkpoints in checkpoint_dir, and none is given: "
                "name the folder or URL that the earlier run wrote to"
            )

    @property
    def stream_output(self) -> bool:
        """Whether everything that the ranks print is shown on the driver."""
        return self.local or self.driver_log_verbosity == "all"

    @property
    def stall_check_seconds(self) -> int:
        """Seconds that a collective may wait before Horovod's stall inspector reports it.

        It reports a tensor that it knows from earlier steps after up to three times as long.
        """
        timeout = self.debug_config.hang_timeout
        if timeout is None:
            return STALL_WARN_SECONDS
        return max(1, min(STALL_WARN_SECONDS, int(timeout / 6)))

    def for_ranks(self) -> Options:
        """The same options without the objects that exist only on the driver."""
        cluster = replace(self.cluster_config, spark=None, resource_profile=None, ship_modules=())
        return replace(self, sinks=(), cluster_config=cluster)


#: The groups among the options, by the names of their arguments.
GROUPS: Final[Mapping[str, type[Any]]] = {
    "checkpoint_config": CheckpointConfig,
    "data_config": DataConfig,
    "cluster_config": ClusterConfig,
    "debug_config": DebugConfig,
}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their own names, such as ``hang_timeout``, as arguments of HorovodRunner.

    Raises:
        TypeError: there is no option of a name.
    """
    arguments: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    home = {option.name: group for group, kind in GROUPS.items() for option in fields(kind)}
    flat = {option.name for option in fields(Options)}
    for name, value in options.items():
        if name in flat:
            arguments[name] = value
        elif name in home:
            groups.setdefault(home[name], {})[name] = value
        else:
            text = meant(name, {*flat, *home}, ALIASES)
            raise TypeError(f"there is no option {name!r}.{did_you_mean(text)}")
    for group, values in groups.items():
        given = arguments.get(group)
        arguments[group] = GROUPS[group](**values) if given is None else replace(given, **values)
    return arguments


def default_of(name: str) -> Any:
    """The default of an option; None for one that has to be given."""
    group = next((kind for kind in GROUPS.values() if name in _names(kind)), Options)
    default = next(option.default for option in fields(group) if option.name == name)
    return None if default is MISSING else default


def _names(kind: type[Any]) -> set[str]:
    return {option.name for option in fields(kind)}
