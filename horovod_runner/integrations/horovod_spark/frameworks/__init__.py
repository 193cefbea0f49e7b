"""Horovod's estimator and model for each framework; saved ones name these files.

Each file may import the room above it and what that may import; nothing there imports these files.
"""
