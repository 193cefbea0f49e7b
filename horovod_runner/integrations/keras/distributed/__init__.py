"""What is distributed on Keras 3: optimizers, batch normalization, horovod.tensorflow's tape."""
