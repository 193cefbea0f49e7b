"""Train a small TensorFlow network on handwritten digits with Horovod, in a custom training loop.

    python examples/digits_tensorflow.py --np -2    # two ranks on this machine, without Spark
    python examples/digits_tensorflow.py --np 2     # two ranks in a local Spark barrier job
    spark-submit --master spark://host:7077 examples/digits_tensorflow.py --np 4

The numbered comments mark the eight steps that turn a script for one process into one for many.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from horovod_runner import HorovodRunner, log_to_driver

if TYPE_CHECKING:
    import tensorflow as tf
    from pyspark.sql import SparkSession

HELD_OUT = 360  # of 1797 digits
BATCH_SIZE = 32  # on each rank
LEARNING_RATE = 0.003  # with one rank


def train(epochs: int, checkpoint: str | None = None) -> dict[str, Any]:
    """Train as one of the ranks; HorovodRunner hands back what rank 0 returns."""
    # Imported here, where the ranks run: the driver needs neither TensorFlow nor Horovod.
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    # 1. Start Horovod.
    hvd.init()

    # 2. Pin this rank to its own GPU.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    # 3. Partition the data: each rank its shard, reshuffled in every epoch. All shards
    #    have the same number of batches, or the rank with one more would wait forever.
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=HELD_OUT, random_state=0, stratify=labels
    )
    share = len(train_y) // hvd.size()
    batches = (
        tf.data.Dataset.from_tensor_slices((train_x, train_y))
        .take(share * hvd.size())
        .shard(hvd.size(), hvd.rank())
        .shuffle(share, seed=0)
        .batch(BATCH_SIZE)
    )

    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
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
    optimizer.build(model.trainable_variables)  # makes its state now, for the broadcast below

    # Horovod reduces TensorFlow's variables; Keras 3 holds each one in its .value.
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))

        # 5. Wrap the tape: it gives the gradients averaged over all ranks.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # 6. Start all ranks from rank 0's weights and optimizer state.
    state = [variable.value for variable in model.variables + optimizer.variables]
    hvd.broadcast_variables(state, root_rank=0)

    losses = []
    for epoch in range(epochs):
        total = sum(step(x, y) for x, y in batches)

        # 7. Average the metrics over the ranks: each has seen its own shard only.
        losses.append(float(hvd.allreduce(total / len(batches), name="loss")))

        # 8. Log and write checkpoints on rank 0 alone.
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
            if checkpoint is not None:
                folder, name = os.path.split(checkpoint)
                part = os.path.join(folder, f"part-{name}")  # Keras goes by the file's ending
                model.save(part)
                os.replace(part, checkpoint)  # never half a file

    # Every rank looks at its part of the held-out digits; the counts are summed.
    mine = slice(hvd.rank(), None, hvd.size())
    hits = tf.argmax(model(test_x[mine]), axis=1) == test_y[mine]
    correct = hvd.allreduce(tf.math.count_nonzero(hits), op=hvd.Sum, name="correct")
    return {"accuracy": int(correct) / HELD_OUT, "losses": losses}


def start_spark(np: int) -> SparkSession:
    """The session of spark-submit, or one on this machine with a slot for each rank."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits").config("spark.ui.showConsoleProgress", "false")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit, which chooses a master, sets it
        builder = builder.master(f"local[{np}]")
    return builder.getOrCreate()


def main() -> int:
    """Parse the command line, train, and say how well it went."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Horovod.")
    parser.add_argument("--np", type=int, default=2, help="ranks; below 0: without Spark")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=os.path.abspath, help="a file for the model: *.keras")
    args = parser.parse_args()

    spark = start_spark(args.np) if args.np > 0 else contextlib.nullcontext()
    with spark:
        runner = HorovodRunner(np=args.np, env={"TF_CPP_MIN_LOG_LEVEL": "2"})
        result = runner.run(train, epochs=args.epochs, checkpoint=args.checkpoint)
    print(f"accuracy on {HELD_OUT} held-out digits: {result['accuracy']:.1%}")
    return 0 if result["accuracy"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
