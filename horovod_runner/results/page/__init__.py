"""One HTML page about a run: ``Run.report`` and ``horovod-runner report``.

`document` puts the page together; one file for each group of sections, and charts, scales and
markup below them. Files here may import results and what is below it, and draw without packages.
"""
