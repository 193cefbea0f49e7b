"""Small helpers for all packages: text for people, numbers, file descriptors, Spark sessions.

Must not import other packages of horovod_runner.
"""
