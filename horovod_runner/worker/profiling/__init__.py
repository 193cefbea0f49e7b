"""Measures inside a rank where its time goes, at all times and at next to no cost.

`clock` adds up what the package's own calls take, `steps` counts the steps of a training, and
`collectives` reads what Horovod's background thread has recorded. `sampler` looks at the lines that
the main thread executes. `profiler` sends a summary of all to the driver once a second.
`framework_profiler` runs torch's or TensorFlow's own profiler where a run asks for it. What
the numbers mean is decided on the driver, in `results`.
"""
