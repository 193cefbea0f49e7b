"""Tools beside a run: command line, migration of old code, checks of a machine, Horovod's build.

May import every other room; no other room may import this one.
"""
