"""Makes the interpreter of a rank like the one of the user's script or notebook.

Its `__main__`, also in processes that the rank starts; logging and warnings; and what asks for a
terminal.
"""
