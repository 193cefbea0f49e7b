"""What crosses a process or network boundary: messages, the driver's channel, job files.

May import common, options and errors only. Kept empty: every rank pays for what is imported here.
"""
