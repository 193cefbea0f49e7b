"""Describes this process to the other ranks: its host, GPUs and network interfaces."""

from __future__ import annotations

import os
import socket

from horovod_runner.host import network
from horovod_runner.host.gpus import identified_gpus
from horovod_runner.spmd.session import Framework
from horovod_runner.spmd.trainers import Interface, Member


def describe_this_rank(framework: Framework) -> Member:
    """Return a description of this process; its rank is 0 until the ranks have met.

    GPUs are listed only if the framework is a CUDA build. An exception while looking for them
    becomes the member's ``problem``.
    """
    gpus: tuple[str, ...] = ()
    problem = ""
    try:
        visible = identified_gpus()
        if visible and _is_cuda_build(framework):
            gpus = visible
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Member(
        rank=0,
        host=network.host_id(),
        hostname=socket.gethostname(),
        gpus=gpus,
        interfaces=tuple(Interface(*interface) for interface in network.interfaces()),
        chosen=os.environ.get("HOROVOD_GLOO_IFACE", ""),
        default=network.default_address(),
        problem=problem,
    )


def _is_cuda_build(framework: Framework) -> bool:
    name = framework
    if framework == "keras":
        import keras

        name = keras.backend.backend()
    if name == "torch":
        import torch

        return torch.version.cuda is not None
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())
