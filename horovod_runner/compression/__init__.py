"""Compressed gradients for ``horovod.torch``: ``Compression.bf16`` and ``Compression.powersgd``.

``worker/redirect.py`` adds them to Horovod's. May import errors only. The modules import torch and
Horovod, so they are imported when ``horovod.torch`` is.
"""
