"""A process's host: network, GPUs, memory, installed software, scratch folders, environment.

Also the servers through which ranks find each other: rendezvous and PMI. May import wire, common,
options and errors.
"""
