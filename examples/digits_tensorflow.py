"""Train a small TensorFlow network on handwritten digits with Horovod, in a custom training loop.

    python examples/digits_tensorflow.py --np -2    # two ranks on this machine, without Spark
    python examples/digits_tensorflow.py --np 2     # two ranks in a local Spark barrier job
    spark-submit --master spark://host:7077 examples/digits_tensorflow.py --np 4

The numbered comments mark the eight steps that make a one-process script distributed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from horovod_runner import HorovodRunner, log_to_driver
from horovod_runner.data import Shard, evaluate

if TYPE_CHECKING:
    import pandas as pd
    import tensorflow as tf
    from pyspark.sql import SparkSession

HELD_OUT = 360  # of 1797 digits
BATCH_SIZE = 32  # on each rank
LEARNING_RATE = 0.003  # with one rank


def train(digits: Shard, held_out: Shard, epochs: int, checkpoint: str | None) -> dict[str, Any]:
    """Train as one of the ranks; ``run`` returns rank 0's value."""
    # Imported here, where the ranks run: the driver needs neither TensorFlow nor Horovod.
    import horovod.tensorflow as hvd
    import tensorflow as tf

    # 1. Start Horovod.
    hvd.init()

    # 2. Pin this rank to its own GPU.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    # 3. Partition the data: each rank gets its part of every batch, in a new order in each epoch.
    #    All ranks get the same number of batches; with one more, a rank would hang.
    columns = {"x": "image", "y": "label"}
    batches = digits.to_tf(BATCH_SIZE, columns, shuffle=True)

    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Reshape((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPool2D(2),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # 4. Scale the learning rate: a step averages the gradients of hvd.size() batches.
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE * hvd.size())
    optimizer.build(model.trainable_variables)  # creates its state, for the broadcast below

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))

        # 5. Wrap the tape: it averages the gradients over all ranks.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # 6. Start all ranks from rank 0's weights and optimizer state.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    losses = []
    for epoch in range(epochs):
        total = sum(step(x, y) for x, y in batches)

        # 7. Average the metrics over the ranks: each has seen only its part of the data.
        losses.append(float(hvd.allreduce(total / len(batches), name="loss")))

        # 8. Log and write checkpoints only on rank 0.
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
            if checkpoint is not None:
                folder, name = os.path.split(checkpoint)
                part = os.path.join(folder, f"part-{name}")  # Keras needs the file's ending
                model.save(part)
                os.replace(part, checkpoint)  # so the file is always complete

    # Every rank evaluates its part of the held-out digits; evaluate averages over all rows.
    def measure(batch: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, y = batch
        return {"accuracy": tf.argmax(model(x), axis=1) == y}

    return {**evaluate(held_out.to_tf(BATCH_SIZE, columns), measure), "losses": losses}


def load() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The digits to train on and those held out: a row has 64 pixels and a label."""
    import pandas as pd
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    digits = pd.DataFrame({"image": (pixels / 16).tolist(), "label": labels})
    train_set, test_set = train_test_split(
        digits, test_size=HELD_OUT, random_state=0, stratify=labels
    )
    return train_set, test_set


def start_spark(np: int) -> SparkSession:
    """The session of spark-submit, or a local one with a slot for each rank."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it, and the master
        builder = builder.master(f"local[{np}]")
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, train, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Horovod.")
    parser.add_argument("--np", type=int, default=2, help="ranks; below 0: without Spark")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=os.path.abspath, help="a file for the model: *.keras")
    args = parser.parse_args()

    digits, held_out = load()
    with start_spark(args.np) if args.np > 0 else contextlib.nullcontext() as spark:
        if spark is not None:  # any Spark DataFrame; this one is made from pandas
            digits = spark.createDataFrame(digits, "image array<double>, label long")
            held_out = spark.createDataFrame(held_out, "image array<double>, label long")
        result = HorovodRunner(np=args.np, env={"TF_CPP_MIN_LOG_LEVEL": "2"}).run(
            train,
            digits=digits,
            held_out=held_out,
            epochs=args.epochs,
            checkpoint=args.checkpoint,
        )
    print(f"accuracy on {HELD_OUT} held-out digits: {result['accuracy']:.1%}")
    return 0 if result["accuracy"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
