"""Old code: notes on the errors that it raises today, and the changes that make it run again.

    names     what Keras 2, TensorFlow 1 and others were called, and what to write today
    notes     the note on an exception that comes from one of these names
    source    files and notebooks as text, and back
    tree      questions to nodes of libcst's tree, and changes of them
    code      a parsed text with its names, its changes, and its lines before them
    rules...  one module for each kind of old code: matchers, reasons and changes
    rewrite   all rules, until none has anything to change

Ranks import ``names`` and ``notes`` after an error. The rest requires libcst and is for the command
line. This package may import errors and nothing else of ours.
"""
