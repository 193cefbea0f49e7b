"""The process that runs `main` for one rank, and the functions that `main` calls.

Must not import task: the worker holds no key of the message channel. Kept empty: every rank pays
for imports here.
"""
