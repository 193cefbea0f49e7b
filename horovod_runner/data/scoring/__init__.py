"""Predictions: a DataFrame and a model become a DataFrame with the model's outputs.

`predict` is the public call. `inputs` makes the model's inputs with the code that feeds training,
`models` and its kinds write a model to a file on the driver and load it in Spark's Python workers,
`outputs` turns results into columns, and `scorer` does all of it for one batch. A PredictionError
is a mistake of the model. May import `data`, `checkpoints` and all below. Must not import
`results`, `driver` or `runner`.
"""
