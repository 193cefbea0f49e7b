"""One trace of a run for Perfetto and Chrome: :meth:`Run.trace`, and the files that it merges.

`arrivals` writes the ranks' own traces on the driver's machine, as they come. `merge` writes the
trace: `summaries` are what the ranks and hosts have measured, `moments` what happened to the run,
and `foreign` reads what Horovod and torch have written. All know one `clocks`. May import what
`results` may; only `Run.trace`, the driver and commands import it.
"""
