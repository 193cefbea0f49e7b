"""Horovod's estimator and model for each framework, and what its ranks run beside `ml`'s training.

Each file may import the room above it and `ml`; nothing there imports these files.
"""
