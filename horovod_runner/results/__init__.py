"""What a run leaves behind: its status, metrics, logs, checkpoints, error and registry entry."""
