"""Write docs/reference/settings.md from the options and their docstrings, and from the list here.

python docs/settings.py > docs/reference/settings.md
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from horovod_runner import HorovodRunner, Limits
from horovod_runner.common import options

HEAD = """# Settings and environment variables

One table of everything that can be set. Arguments of `HorovodRunner` are those that people use
every day. The others are fields of four groups, each passed as one argument:

```python
from horovod_runner import CheckpointConfig, DebugConfig, HorovodRunner

runner = HorovodRunner(
    np=-2,
    checkpoint_dir="checkpoints",
    checkpoint_config=CheckpointConfig(num_to_keep=5),
    debug_config=DebugConfig(hang_timeout=600),
    env={"NCCL_DEBUG": "INFO"},
)
```

On the command line an option has its name with dashes: `--num-to-keep 5`, `--hang-timeout none`
([command line](cli.md)). A script on the command line shows all output by default; in Python,
`driver_log_verbosity` is `"log_callback_only"`.

| the table says | where you set it |
|---|---|
| `HorovodRunner` | an argument of `HorovodRunner` |
| `CheckpointConfig` | a field of it: `checkpoint_config=CheckpointConfig(...)` |
| `DataConfig` | a field of it: `data_config=DataConfig(...)` |
| `ClusterConfig` | a field of it: `cluster_config=ClusterConfig(...)` |
| `DebugConfig` | a field of it: `debug_config=DebugConfig(...)` |
| ranks | a variable for the ranks: `env={"NAME": "value"}`, or `--env NAME=value` |
| driver | a variable of the process that calls `run`, before the run |
| executors | a variable of the hosts, or in Spark `spark.executorEnv.NAME` |
| install | a variable of `horovod-runner install` |

<!-- docs/settings.py makes this page from the docstrings of the options. -->

## All of them

| name | where | default | meaning |
|---|---|---|---|
"""

LIMITS = """
## Time limits

How long a run waits for each thing, in seconds. The defaults suit runs of one to a thousand ranks.
Raise a limit where the network or the machines are slower than that; the command line has no flags
for them:

```python
from horovod_runner import ClusterConfig, HorovodRunner, Limits

runner = HorovodRunner(
    np=64, cluster_config=ClusterConfig(limits=Limits(all_tasks=600, silent_task=60))
)
```

| field of `Limits` | seconds | meaning |
|---|---|---|
"""

#: Name, where it is set, default, meaning. A test compares the names with the package's code.
VARIABLES = (
    (
        "HOROVOD_CONTROLLER",
        "ranks, driver",
        "",
        '`gloo` or `mpi`, where `cpu_collectives` is "auto" '
        "([collectives](../concepts/collectives.md))",
    ),
    (
        "HOROVOD_CYCLE_TIME",
        "ranks",
        "20 on CPUs, 1 on GPUs",
        "milliseconds between two polls of Horovod's background thread while no thread waits",
    ),
    (
        "HOROVOD_GLOO_IFACE",
        "ranks",
        "the interface that reaches the driver",
        "the network interface of rendezvous, Gloo, MPI, NCCL and `MASTER_ADDR` "
        "([networks](../where/networks.md))",
    ),
    (
        "HOROVOD_CACHE_CAPACITY",
        "ranks",
        "Horovod's",
        "`0` makes Horovod's timeline record which rank has a tensor ready, for all tensors "
        "([why it is slow](../howto/slow.md))",
    ),
    (
        "HOROVOD_RUNNER_DRIVER_HOST",
        "driver",
        "`spark.driver.host`",
        "the address at which executors reach the driver, as behind NAT",
    ),
    (
        "HOROVOD_RUNNER_WHEELS",
        "install",
        "",
        "a folder, a volume or a URL of published wheels of Horovod, which need no compiler "
        "([wheels](../where/wheels.md))",
    ),
    (
        "HOROVOD_RUNNER_TORCH_BACKEND",
        "ranks",
        "`hvd`",
        "`gloo`: `init_process_group()` without a backend takes gloo for CPU tensors "
        "([torch.distributed](../howto/torch_distributed.md))",
    ),
    (
        "OMP_NUM_THREADS",
        "ranks",
        "cores / ranks of the host",
        "threads of a rank; also `TF_NUM_INTRAOP_THREADS` and `TF_NUM_INTEROP_THREADS`",
    ),
    (
        "PYTHONHASHSEED",
        "ranks",
        "0",
        "the seed of the hashes of texts: the order of a set is then the same on all ranks",
    ),
    (
        "MPIR_CVAR_CH4_CMA_ENABLE",
        "ranks",
        "0 where a rank may not read another's memory",
        "whether MPICH reads large messages from the sender's memory. A rank tries at its start "
        "whether it may ([containers](../where/docker.md#what-containers-forbid))",
    ),
    (
        "MPIR_CVAR_ENABLE_HEAVY_YIELD",
        "ranks",
        "1 with more than 16 ranks on a core",
        "lets ranks sleep while they wait inside MPICH. All variables that begin with "
        "`MPIR_CVAR_`, `UCX_` or `FI_` are passed from the driver to the ranks",
    ),
    (
        "UCX_NET_DEVICES",
        "ranks, driver",
        "the job's interface, without RDMA",
        "the network devices of MPICH",
    ),
    ("KERAS_BACKEND", "ranks", "Keras's", "`tensorflow` or `torch` ([Keras](../howto/keras.md))"),
    (
        "TF_USE_LEGACY_KERAS",
        "ranks",
        "",
        "`1`: `tf.keras` is Keras 2, of the package tf_keras ([old code](../howto/migrate.md))",
    ),
    (
        "TMPDIR",
        "executors",
        "the system's",
        "the folder for packed datasets and other temporary files",
    ),
    (
        "PYSPARK_PYTHON",
        "driver",
        "Spark's",
        "the executors' Python; with Spark Connect in the server's environment",
    ),
    (
        "XDG_STATE_HOME",
        "driver",
        "`~/.local/state`",
        "where the list and the records of runs are, for `horovod-runner ps` and `report`",
    ),
    (
        "XDG_CACHE_HOME",
        "install",
        "`~/.cache`",
        "where built wheels of Horovod are kept",
    ),
    (
        "HOROVOD_CUDA_HOME",
        "install",
        "`CUDA_HOME`, `CUDA_PATH`, `nvcc`'s, `/usr/local/cuda`",
        "the CUDA toolkit ([GPUs](../howto/gpu.md#building))",
    ),
    (
        "HOROVOD_NCCL_HOME",
        "install",
        "torch's wheel of NCCL, `/usr`",
        "the folder with NCCL's header and library",
    ),
    (
        "HOROVOD_BUILD_CUDA_CC_LIST",
        "install",
        "the machine's GPUs",
        "GPU architectures to build for: `80,90`",
    ),
    (
        "HOROVOD_BUILD_ARCH_FLAGS",
        "install",
        "the machine's CPU",
        "compiler flags for the CPU: `-march=x86-64-v3` for a wheel that other machines use; "
        "empty for none",
    ),
    ("CXX", "install", "`c++`, `g++`, `clang++`", "the C++ compiler"),
)


def _markdown(text: str) -> str:
    """A docstring's text for a cell of a table."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


def _arguments(documented: type[Any]) -> dict[str, str]:
    section = (inspect.getdoc(documented) or "").partition("Args:")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): ((?:.+\n?)(?: {8}.+\n?)*)", section, re.MULTILINE)
    return {name: _markdown(text) for name, text in found}


def _default(option: Any) -> str:
    if option.name in options.GROUPS:
        return f"`{options.GROUPS[option.name].__name__}()`"
    if option.default is not MISSING:
        return f"`{option.default!r}`"
    return "required" if option.default_factory is MISSING else "`{}`"


def page() -> str:
    """The text of docs/reference/settings.md."""
    rows = []
    kinds = [(options.Options, HorovodRunner), *((kind, kind) for kind in options.GROUPS.values())]
    for kind, documented in kinds:
        where, texts = documented.__name__, _arguments(documented)
        rows += [
            f"| `{option.name}` | `{where}` | {_default(option)} | {texts[option.name]} |"
            for option in fields(kind)
        ]
    rows += [
        f"| `{name}` | {where} | {default} | {meaning} |"
        for name, where, default, meaning in VARIABLES
    ]
    foot = """
Each rank also finds the variables of `torch.distributed` (`MASTER_ADDR`, `MASTER_PORT`, `RANK`,
`LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`) and of Horovod (`HOROVOD_RANK`, `HOROVOD_SIZE` and
others). They identify the rank: `env` cannot change them.
"""
    return HEAD + "\n".join(rows) + "\n" + foot + LIMITS + "\n".join(_limits()) + "\n"


def _limits() -> list[str]:
    """The rows of the time limits."""
    texts = _arguments(Limits)
    return [
        f"| `{limit.name}` | {limit.default:g} | {texts[limit.name]} |" for limit in fields(Limits)
    ]


if __name__ == "__main__":
    print(page(), end="")
