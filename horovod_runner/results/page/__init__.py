"""One HTML page about a run: ``Run.report`` and ``horovod-runner report``.

`document` fills run.html with what the other files compute, one for each group of sections.
`charts` draws with matplotlib; without it the page has no charts, and says so. Files here may
import results and what is below it.
"""
