"""Engines started for real on this machine, each by a small starter of its own."""
