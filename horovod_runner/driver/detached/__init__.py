"""Detached mode: supervision beside rank 0, where no task reaches the driver.

The stand-in runs on an executor. The journal brings to the driver, while the run lasts, what the
stand-in receives.
"""
