"""One trace of a run for Perfetto and Chrome: :meth:`Run.trace`, and the files that it merges.

`arrivals` writes the ranks' own traces on the driver's machine, piece by piece. `merge` writes the
trace of the run from all sources: `summaries` has the counters of ranks and hosts, `moments` the
events of the run, and `foreign` reads the traces of Horovod and torch. `clocks` places them all on
one time line, `events` knows the format. May import what `results` may. Only `Run.trace` and the
driver import it.
"""
