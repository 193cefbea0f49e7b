"""A process's host: network, GPUs, memory, installed software, scratch folders, environment.

May import wire, common, options and errors.
"""
