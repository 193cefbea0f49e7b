"""Supervises a run from the driver: places ranks, listens to them, ends the run or relaunches it.

`launcher` has the base classes of what starts ranks. May import results, sinks, task, checkpoints
and the rooms below them; no launcher, and nothing of run: it is given a finished job.
"""
