"""All checks, in the order in which they run: what has to work for the next ones comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.tools.verify.check import Check, Needs
from horovod_runner.tools.verify.checks import (
    bandwidth,
    build,
    failures,
    feed,
    keras_training,
    placement,
    profile,
    sharded,
    training,
)

_PLACES: Final = "howto/gpu.md#which-gpu-a-rank-gets"
_GPU: Final = Needs(gpus=1)

CHECKS: Final[Sequence[Check]] = (
    Check(
        "build",
        "Horovod is built with NCCL for a framework of this environment.",
        "howto/gpu.md#building",
        60,
        build.libraries,
        Needs(frameworks=()),
    ),
    Check(
        "reductions",
        "Horovod's collectives give right results on the ranks' GPUs, and allreduces go over NCCL.",
        "howto/gpu.md#building",
        120,
        build.reductions,
    ),
    Check(
        "current",
        "Each rank gets one GPU, in the order of local_rank, and code that pins nothing uses it.",
        _PLACES,
        90,
        placement.current,
        _GPU,
    ),
    Check(
        "pinned",
        "Code that pins itself by hvd.local_rank() uses the rank's own GPU.",
        _PLACES,
        90,
        placement.pinned,
        _GPU,
    ),
    Check(
        "mask",
        'gpu_pinning="mask" shows a rank only its own GPU, as device 0.',
        _PLACES,
        90,
        placement.mask,
        _GPU,
    ),
    Check(
        "order",
        "The ranks follow the order of CUDA_VISIBLE_DEVICES.",
        _PLACES,
        90,
        placement.reordered,
        Needs(gpus=2),
    ),
    Check(
        "two-each",
        "With gpus_per_rank=2, devices[hvd.local_rank()] is the first GPU of each rank.",
        _PLACES,
        90,
        placement.several_each,
        Needs(gpus=4),
    ),
    Check(
        "preloaded",
        "Ranks that are forked with torch imported use their GPUs.",
        "howto/warm.md",
        90,
        placement.preloaded,
        _GPU,
    ),
    Check(
        "tensorflow",
        "TensorFlow sees only the rank's own GPU.",
        _PLACES,
        120,
        placement.tensorflow_current,
        Needs(gpus=1, frameworks=("tensorflow",)),
    ),
    Check(
        "tensorflow-pinned",
        "TensorFlow code that pins itself by hvd.local_rank() uses the rank's own GPU.",
        _PLACES,
        120,
        placement.tensorflow_pins_itself,
        Needs(gpus=1, frameworks=("tensorflow",)),
    ),
    Check("hidden", "gpus_per_rank=0 trains on CPUs.", "howto/gpu.md", 60, placement.hidden),
    Check(
        "refused",
        "A run with more ranks than GPUs is refused before a rank starts.",
        _PLACES,
        60,
        placement.refused,
    ),
    Check(
        "shared",
        "gpus_per_rank=0.5 puts two ranks on one GPU. They reduce on the CPU, because NCCL has one "
        "rank per GPU.",
        "howto/gpu.md#two-ranks-on-one-gpu",
        150,
        placement.shared,
        _GPU,
    ),
    Check(
        "allreduce",
        "An allreduce is about as fast as torch.distributed's, and as nccl-tests measures NCCL.",
        "howto/gpu.md#how-fast",
        240,
        bandwidth.allreduce,
        Needs(several=True),
    ),
    Check(
        "resnet50",
        "With one rank, ResNet-50 trains as fast as with plain PyTorch, with the same losses.",
        "howto/gpu.md#how-fast",
        180,
        training.one_rank,
    ),
    Check(
        "resnet50-all",
        "With a rank per GPU, ResNet-50 trains about as fast as with DDP, and weights stay equal.",
        "howto/gpu.md#how-fast",
        180,
        training.all_ranks,
        Needs(several=True),
    ),
    Check(
        "feed",
        "Batches arrive on the rank's GPU, through pinned memory, while the step before computes.",
        "howto/gpu.md#how-fast",
        120,
        feed.feed,
        Needs(packages=("pyarrow",)),
    ),
    Check(
        "keras-tensorflow",
        "Keras trains on the ranks' GPUs with its TensorFlow backend.",
        "howto/keras.md",
        150,
        keras_training.tensorflow,
        Needs(frameworks=("tensorflow",), packages=("keras",)),
    ),
    Check(
        "keras-torch",
        "Keras trains on the ranks' GPUs with its torch backend.",
        "howto/keras.md",
        150,
        keras_training.torch,
        Needs(packages=("keras",)),
    ),
    Check(
        "fsdp2",
        "FSDP2 shards a model over the ranks' GPUs, with the losses of the model in one piece.",
        "howto/gpu.md#other-libraries",
        120,
        sharded.fsdp,
    ),
    Check(
        "failures",
        "When a run has failed, no process of it is left, and the memory of its GPUs is free.",
        "reference/failures.md",
        240,
        failures.memory,
    ),
    Check(
        "restart",
        "A killed rank is relaunched, and resumes from a checkpoint of GPU tensors.",
        "howto/checkpoints.md",
        120,
        failures.restart,
    ),
    Check(
        "profile",
        "A run measures its GPUs, and torch's profiler records their kernels.",
        "howto/gpu.md#how-busy-they-are",
        120,
        profile.profile,
    ),
)


def find(name: str) -> Check:
    """Return a check.

    Raises:
        HorovodRunnerError: there is no check of that name.
    """
    for check in CHECKS:
        if check.name == name:
            return check
    names = ", ".join(check.name for check in CHECKS)
    raise HorovodRunnerError(f"there is no check {name!r}; the checks are {names}")
