"""What a run leaves behind: its status, metrics, logs, checkpoints, error and registry entry.

May import sinks, task, warm, checkpoints, wire and common. Must not import the driver.
"""
