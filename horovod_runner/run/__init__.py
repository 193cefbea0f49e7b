"""The call of a user: HorovodRunner, the run under way, and what is made ready before its launch.

`runner` has HorovodRunner, and `handle` puts together what one run takes: options, launcher, sinks,
checkpoints. `datasets`, `make_job` and `pickling` make the arguments of ``main`` ready to travel,
and `import_hooks` lists which modules of frameworks are changed in a rank.
"""
