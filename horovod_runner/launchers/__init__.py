"""Start the ranks of a run: as local processes, as a Spark barrier job, or with Slurm's srun.

Each extends the base classes of `driver.launcher`. It reports outcomes and decides nothing.
"""
