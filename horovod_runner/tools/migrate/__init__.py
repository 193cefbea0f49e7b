"""Old code, and the changes that make it run again.

    source    files and notebooks as text, and back
    tree      questions to nodes of libcst's tree, and changes of them
    code      a parsed text with its names, its changes, and its lines before them
    rules...  one module for each kind of old code: matchers, reasons and changes
    rewrite   all rules, until none has anything to change

Old names of Keras and TensorFlow are those of worker/old_keras_names.py, with which ranks explain
errors. Requires libcst. May import these names and errors, and nothing else of ours.
"""
