"""Detects mistakes in a user's training code while it runs as a rank.

Every check is cheap: it acts at the first steps, at growing intervals, once per epoch, or once per
call of something slow. A rank sends what it sees to the driver (`notes`), which compares the ranks
and warns once.

A worker does not import this package at its start, only with the library that is checked
(:mod:`horovod_runner.run.import_hooks`).
"""
