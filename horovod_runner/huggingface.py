"""A callback for Hugging Face's Trainer.

The public name of :mod:`horovod_runner.integrations.huggingface`.
"""

from horovod_runner.integrations.huggingface import ReportCallback, resume_from

__all__ = ["ReportCallback", "resume_from"]
