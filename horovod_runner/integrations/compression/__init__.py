"""Compressed gradients for ``horovod.torch``: ``Compression.bf16`` and ``Compression.powersgd``.

The modules import torch and Horovod, so they are imported when ``horovod.torch`` is.
"""

from __future__ import annotations

from typing import Any


def offer(module: Any) -> None:
    """Add them to Horovod's; called with the module ``horovod.torch.compression``."""
    from horovod_runner.integrations.compression.bfloat16 import BFloat16
    from horovod_runner.integrations.compression.powersgd import PowerSGD

    module.Compression.bf16 = BFloat16
    module.Compression.powersgd = PowerSGD
