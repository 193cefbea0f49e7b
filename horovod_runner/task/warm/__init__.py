"""Warm starts: worker processes forked from a process that has imported the frameworks.

    a run      its worker imports torch; the task then starts a fork server, which imports it too
    the next   task --descriptors, environment--> fork server --fork--> guard --> worker

`client` is the task's side, `server` the fork server, `protocol` what they say to each other, and
`fingerprint` decides whether a fork server fits.
"""
