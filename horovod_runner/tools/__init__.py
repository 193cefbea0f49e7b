"""Tools beside a run: command line, migration of old code, checks of a machine, Horovod's build.

No other room may import this one.
"""
