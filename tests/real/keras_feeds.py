"""``model.fit`` on feeds of a Shard, with the callbacks in an order that nobody should copy.

The functions run in the ranks. Each compares with one process, which has all rows as arrays.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pandas

import horovod_runner.keras as hvd  # imports nothing here

COLUMNS = {"x": ["a", "b"], "y": "label"}
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "it", "was", "is", "good", "bad"]
ROWS, VALID = 48, 27  # of validation: 14 on rank 0, 13 on rank 1, in batches of 8


def table() -> pandas.DataFrame:
    random = numpy.random.default_rng(0)
    chances = numpy.arange(len(WORDS), 0, -1) / sum(range(len(WORDS) + 1))
    numbers = random.normal(size=(ROWS, 2)).astype("float32")
    texts = [random.choice(WORDS, random.integers(1, 9), p=chances) for _ in range(ROWS)]
    return pandas.DataFrame(
        {
            "a": numbers[:, 0] * 3,
            "b": numbers[:, 1] - 5,
            "label": (numbers.sum(1) + random.normal(size=ROWS) > 0).astype("float32"),
            "text": [" ".join(words) for words in texts],
            "city": random.choice(["Rome", "Oslo", "Bonn", "Kyiv"], ROWS, p=[0.4, 0.3, 0.2, 0.1]),
            "code": random.choice([5, 17, 99], ROWS, p=[0.5, 0.3, 0.2]),
        }
    )


def _network(optimizer: Any, run_eagerly: bool = True) -> Any:
    import keras

    start = keras.initializers.GlorotUniform(1)
    layers = [keras.Input((2,)), keras.layers.Dense(1, "sigmoid", kernel_initializer=start)]
    model = keras.Sequential(layers)
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    model.compile(optimizer, "binary_crossentropy", metrics=metrics, run_eagerly=run_eagerly)
    return model


def _recording(seen: list[dict[str, Any]]) -> Any:
    import keras

    return keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))


def _callbacks(*first: Any) -> list[Any]:
    """Those that average come last, and those that decide by the averages before them."""
    import keras

    return [
        *first,
        hvd.callbacks.ReportCallback(save_every=0),
        keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=10),
        keras.callbacks.EarlyStopping(patience=1, min_delta=10),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]


def _feeds(data: Any) -> dict[str, tuple[Any, Any]]:
    """Feeds of a Shard for the backend, to train and to validate with."""
    import keras

    whole = data["train"], data["valid"]
    made = {
        "to_tf": [each.to_tf(8, COLUMNS) for each in whole],
        "global batch": [each.to_tf(global_batch=7, columns=COLUMNS) for each in whole],
        "mapped": [each.to_tf(8, COLUMNS).map(lambda x, y: (x, y)).prefetch(2) for each in whole],
        "few rows": [each.to_tf(8, COLUMNS) for each in (data["train"], data["few"])],
    }
    if keras.backend.backend() == "torch":
        made["to_torch"] = [each.to_torch(8, COLUMNS) for each in whole]
        made["to_torch, global batch"] = [
            each.to_torch(global_batch=7, columns=COLUMNS) for each in whole
        ]
    return {name: (train, valid) for name, (train, valid) in made.items()}


def fits(data: Any) -> dict[str, Any]:
    """By kind of feed: what callbacks have seen, what one process has, and warnings."""
    import keras

    all_rows = table()
    results = {}
    for name, (train, valid) in _feeds(data).items():
        # TensorFlow would build graphs for each, for seconds.
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model = _network(optimizer, run_eagerly=name != "to_tf")
        seen: list[dict[str, Any]] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(
                train,
                epochs=4,
                validation_data=valid,
                verbose=0,
                callbacks=_callbacks(_recording(seen)),
            )
        rows = all_rows[: 1 if name == "few rows" else VALID]
        x, y = rows[["a", "b"]].to_numpy(), rows["label"].to_numpy()
        one = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        results[name] = {
            "seen": seen,
            "one": {f"val_{metric}": value for metric, value in one.items()},
            "epochs": len(history.epoch),
            "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
            "shuffle": [str(each.message) for each in caught if "shuffle" in str(each.message)],
            "weights": [weight.tolist() for weight in model.get_weights()],
        }
    results["one process"] = _one_process(all_rows)
    return results


def _one_process(rows: pandas.DataFrame) -> Any:
    """The weights after two epochs of global batches of 7 rows."""
    import keras

    model = _network(keras.optimizers.SGD(0.1))
    model.fit(
        rows[["a", "b"]].to_numpy(),
        rows["label"].to_numpy(),
        epochs=2,
        batch_size=7,
        shuffle=False,
        verbose=0,
    )
    return [weight.tolist() for weight in model.get_weights()]


LAYERS: dict[str, tuple[Callable[[Any], Any], str | list[str]]] = {
    "TextVectorization": (lambda layers: layers.TextVectorization(), "text"),
    "TF-IDF": (lambda layers: layers.TextVectorization(output_mode="tf_idf"), "text"),
    "shortened": (lambda layers: layers.TextVectorization(max_tokens=8, ngrams=2), "text"),
    "StringLookup": (lambda layers: layers.StringLookup(), "city"),
    "IntegerLookup": (lambda layers: layers.IntegerLookup(), "code"),
    "Normalization": (lambda layers: layers.Normalization(), ["a", "b"]),
    "of one column": (lambda layers: layers.Normalization(), "a"),
    "of all values": (lambda layers: layers.Normalization(axis=None), ["a", "b"]),
    "Discretization": (lambda layers: layers.Discretization(num_bins=4), "a"),
}


def _learned(layer: Any) -> Any:
    import keras

    if hasattr(layer, "bin_boundaries"):
        return [[*map(float, layer.bin_boundaries)]]  # a list of Keras's cannot be pickled
    if not hasattr(layer, "get_vocabulary"):
        return [keras.ops.convert_to_numpy(each).ravel() for each in (layer.mean, layer.variance)]
    lookup = getattr(layer, "_lookup_layer", layer)
    weights = lookup.idf_weights_const.numpy() if lookup.output_mode == "tf_idf" else []
    return [[*map(str, layer.get_vocabulary())], weights]


def adapted(data: Any) -> dict[str, Any]:
    """What layers have learned from a feed on this rank, and what one process learns."""
    import keras

    results = {}
    for number, (name, (make, column)) in enumerate(LAYERS.items()):
        columns = {"x": column, "y": "label"}
        feed: Any = data["train"].to_tf(global_batch=7, columns=columns, shuffle=True)
        if number % 3 == 1:
            feed = feed.map(lambda x, y, *_: (x, y))
        elif number % 3 == 2:
            feed = data["train"].batches(8, columns)
        layer = make(keras.layers)
        hvd.adapt(layer, feed, "x" if number % 3 == 2 else None)
        alone, values = make(keras.layers), table()[column].to_numpy()
        if values.dtype.kind not in "if":
            values = values.astype(str)
        alone.adapt(values[:, None] if values.ndim == 1 else values)
        results[name] = _learned(layer), _learned(alone)
    return results


def text_inside(data: Any) -> dict[str, Any]:
    """A network that begins with text, and what its file predicts."""
    import keras
    import tensorflow as tf

    layers = keras.layers
    shard = data["train"]
    vectors = layers.TextVectorization(output_sequence_length=8)
    cities = layers.StringLookup(output_mode="one_hot")
    hvd.adapt(vectors, shard.to_tf(8, {"text": "text"}))
    hvd.adapt(cities, shard.to_tf(8, {"city": "city"}))
    text = keras.Input((1,), dtype="string", name="text")
    city = keras.Input((1,), dtype="string", name="city")
    words = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(vectors(text)))
    hashed = layers.Hashing(3, output_mode="one_hot")(city)
    joined = layers.Concatenate()([words, cities(city), hashed])
    model = keras.Model([text, city], layers.Dense(1)(joined))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    feed = shard.to_tf(8, {"text": "text", "city": "city", "y": "label"})
    feed = feed.map(lambda text, city, y: ({"text": text, "city": city}, y))
    history = model.fit(feed, epochs=2, validation_data=feed, verbose=0, callbacks=_callbacks())
    rows = {name: tf.constant(table()[name].tolist()) for name in ("text", "city")}
    scored = model.predict_on_batch(rows)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        again = keras.models.load_model(f"{folder}/model.keras").predict_on_batch(rows)
    weights = [weight.tolist() for weight in model.get_weights()]
    same = bool(numpy.allclose(scored, again))
    return {"loss": history.history["loss"], "weights": weights, "same": same}


def run_all(**data: Any) -> list[dict[str, Any]]:
    """The results of all functions, by rank."""
    import keras

    hvd.init()
    results = {"fits": fits(data), "adapted": adapted(data)}
    if keras.backend.backend() == "tensorflow":
        results["text"] = text_inside(data)
    return list(hvd.allgather_object(results))
