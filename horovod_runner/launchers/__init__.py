"""Start the ranks of a run: as local processes, as a Spark barrier job, or with Slurm's srun.

Each launcher extends the base classes of `driver.launcher`. May import these, the driver's stand-in
(for tasks that do not reach the driver), and task, data, host, wire and common. A launcher reports
outcomes and decides nothing.
"""
