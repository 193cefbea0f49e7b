"""A process's host: network, GPUs, memory, installed software, scratch folders, environment."""
