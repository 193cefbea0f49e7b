"""Elastic runs: tasks that live as long as the run, and attempts on those that are there."""
