"""How the ranks of a run find each other: Horovod's rendezvous, MPICH's PMI, and the environment.

May import `host`, `wire` and `common`.
"""
