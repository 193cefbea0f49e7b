"""What all rooms share: options, limits, clocks, numbers, text for people, files, Spark sessions.

Must not import other packages of horovod_runner.
"""
