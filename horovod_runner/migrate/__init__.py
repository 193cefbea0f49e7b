"""Old code: notes on the errors that it raises today, and the changes that make it run again.

    names     what Keras 2, TensorFlow 1 and others were called, and what to write today
    notes     the note on an exception that comes from one of these names
    source    files and notebooks as text, and back
    code      a parsed text, and what the rules ask of it
    edits     changes to a text, and where its lines were before
    rules...  one module for each kind of old code
    rewrite   all rules, until none has anything to change

Ranks import ``names`` and ``notes`` after an error. The rest requires libcst and is for the command
line. This package may import errors and nothing else of ours.
"""
