"""The backend "hvd" of torch.distributed.

The public name of :mod:`horovod_runner.integrations.torch_backend`.
"""

from horovod_runner.integrations.torch_backend import register

__all__ = ["register"]
