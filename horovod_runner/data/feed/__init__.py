"""Rows to batches: their order, the parts of a batch, and tensors for torch and TensorFlow.

Also the threads that prepare batches ahead, and :func:`evaluate`. May import `data.pack`, `host`
and `errors`. Must not import `data.read`. Only `torch_feed`, `tf_feed` and functions of
`evaluation` import a framework.
"""
