"""What crosses a process or network boundary: messages, channel, job files; small collectives.

May import common, options and errors only. Kept empty: every rank pays for what is imported here.
"""
