"""Hugging Face's Trainer in a run: a callback, and what depends on the number of ranks.

The public name of :mod:`horovod_runner.integrations.huggingface`.
"""

from horovod_runner.integrations.huggingface import ReportCallback, batch_per_rank, resume_from

__all__ = ["ReportCallback", "batch_per_rank", "resume_from"]
