"""Checkpoints: their file formats and folders; saved and loaded by ranks, kept by the driver."""
