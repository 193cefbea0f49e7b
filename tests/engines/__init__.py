"""Engines started for real on this machine, each by a small starter of its own."""


class EngineError(Exception):
    """The engine cannot be had or has failed; the text says in one line what is missing."""
