"""Sinks show or store what the ranks of a run send back: terminal, progress, MLflow, TensorBoard.

A sink must not start or end a run. Only the base class is loaded here: MLflow, TensorBoard and tqdm
load with the modules that use them.
"""

from horovod_runner.sinks.sink import EVENTS, Sink

__all__ = ["EVENTS", "Sink"]
