"""How a run's ranks find each other: Horovod's rendezvous, MPICH's PMI, and the environment."""
