"""Supervises one rank's worker process, in a Spark task or in a thread of the driver.

A task starts the worker, forwards its output and messages to the driver, and reports how it ended.
Kept empty: every task pays for imports here.
"""
