"""Supervises a run from the driver: places ranks, listens to them, ends the run or relaunches it.

`launcher` has the base classes of what starts ranks. It imports no launcher, and nothing of run: it
is given a finished job.
"""
