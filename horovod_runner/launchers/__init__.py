"""Start the ranks of a run: as local processes, as a Spark barrier job, or with Slurm's srun.

Each launcher implements the two protocols of `launcher.py`. May import task, data, host, wire and
common. Must not import driver: a launcher reports outcomes and decides nothing.
"""
