"""A strategy and a callback for Lightning.

The public name of :mod:`horovod_runner.integrations.lightning`.
"""

from horovod_runner.integrations.lightning import HorovodStrategy, ReportCallback, resume_from

__all__ = ["HorovodStrategy", "ReportCallback", "resume_from"]
