"""What ``model.fit`` of a rank does beside Keras: exact validation, and metrics of all ranks.

May import worker, data, wire and common, and the rest of this package. Nothing here is imported
before Keras.
"""
