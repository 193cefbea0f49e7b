"""Checkpoints: their file formats and folders; saved and loaded by ranks, kept by the driver.

May import host, wire, common, options and errors.
"""
