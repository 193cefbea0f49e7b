"""Says where the time of a run goes, and why it is slow.

`profile` holds what the ranks have measured, and `totals` adds it up by rank. `diagnosis` asks the
rules of `slow_ranks` and `causes`, which look at a `case`. `lines` finds the user's own lines, and
`flame` draws them. May import `wire` and `common`; the rest of `results` uses it.
"""
