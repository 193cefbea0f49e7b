"""How many small changes of the package do the tests notice? With cosmic-ray's changes.

    make coverage                       # once: which test runs which line, in .lines
    make mutation                       # 160 changes, drawn by a seed, a share for each room
    make mutation SEED=7 COUNT=40 ROOMS='data wire'

`run` draws changes from all that cosmic-ray's operators can make (`==` to `!=`, `and` to `or`,
numbers by one, loops that never run...), lets cosmic-ray make one after the other in a copy of the
checkout, and writes the scores into scores.md. `covering` is the command that cosmic-ray runs for
each: the tests that run the changed lines, the cheapest first. equivalent.toml lists changes that
change no behaviour, with the reason; they do not count.
"""
