"""Elastic runs: tasks that live as long as the run, and attempts on those that are there.

May import launchers and what is below them; nothing of driver/. `horovod_states` runs in ranks: it
imports no launcher.
"""
