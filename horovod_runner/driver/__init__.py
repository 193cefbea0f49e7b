"""Supervises a run from the driver: places ranks, listens to them, and ends the run.

May import results, launchers, sinks, task, checkpoints and the packages below them. Must not import
prepare or the runner: it is given a finished job.
"""
