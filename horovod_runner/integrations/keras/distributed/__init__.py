"""What is distributed on Keras 3: optimizers, batch normalization, and horovod.tensorflow's tape.

These modules may import the collectives and the reduction of horovod_runner.keras, and worker.
"""
