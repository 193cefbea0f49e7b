"""What is looked for in old code: one function for each kind.

A rule takes a :class:`~horovod_runner.migrate.code.Code` and yields findings. It finds nothing in
what it has changed itself. Rules import code, edits and names, and functions of each other.
"""
