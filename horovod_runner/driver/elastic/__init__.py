"""Elastic runs: tasks that live as long as the run, and attempts on those that are there.

May import `driver.launcher` and the rooms below driver; nothing else of driver/.
"""
