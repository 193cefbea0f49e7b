"""What crosses a process or network boundary: messages, channel, job files; small collectives.

Kept empty: every rank pays for what is imported here.
"""
