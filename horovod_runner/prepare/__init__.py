"""What happens on the driver before a launch: main is pickled and datasets are made ready.

May import launchers, data, host and wire. Must not import driver: nothing has started yet.
"""
