"""Loops of one's own: `prepare` their parts, count `epochs`, keep what is `checkpointed`.

Each module works on objects of torch or Keras that the user made, and imports a framework only if
the user's objects are of it.
"""
