"""Sinks show or store what the ranks of a run send back: terminal, progress, MLflow, TensorBoard.

A sink may import checkpoints, wire, common and errors. It must not import the driver, and it must
not start or end a run. Only the base class is loaded here: MLflow, TensorBoard and tqdm load with
the modules that use them.
"""

from horovod_runner.sinks.sink import EVENTS, Sink

__all__ = ["EVENTS", "Sink"]
