"""Code for Keras 2, sparkdl and Petastorm: its errors say what to do, and migrated it trains."""
# ruff: noqa: PLW0108 - what a lambda calls must fail inside of it

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from horovod_runner import RankFailedError
from horovod_runner.tools.commands import cli
from horovod_runner.tools.commands.run import find_main
from tests.conftest import Ranks
from tests.real.test_keras import runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.horovod

# With the tests of test_keras.py, whose runs import TensorFlow in the same fork server.
ON_TENSORFLOW = pytest.mark.xdist_group("keras on tensorflow")
# As it was written in 2020.
SCRIPT = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd
from tensorflow.keras import backend as K


def main():
    hvd.init()
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    random = np.random.RandomState(hvd.rank())
    x = random.rand(64, 4).astype("float32")
    y = x.sum(axis=1)

    def batches():
        while True:
            for begin in range(0, 64, 16):
                yield x[begin:begin + 16], y[begin:begin + 16]

    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    opt = tf.keras.optimizers.SGD(lr=0.01 * hvd.size())
    model.compile(hvd.DistributedOptimizer(opt), "mse", experimental_run_tf_function=False)
    K.set_value(model.optimizer.lr, 0.02 * hvd.size())
    model.fit_generator(batches(), 4, epochs=2, verbose=0, workers=1)
    rate = float(K.get_value(model.optimizer.lr))
    return model.get_weights()[0].tolist(), rate, len(opt.variables())
"""
NOTEBOOK = [
    "%pip install petastorm",
    "import torch\nimport horovod.torch as hvd\nfrom sparkdl import HorovodRunner",
    """
    from petastorm.spark import SparkDatasetConverter, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/tmp/cache")
    df = spark.range(256).selectExpr("id % 16 / 16.0 as a", "cast(id % 16 / 8.0 as float) as y")
    converter = make_spark_converter(df)
    """,
    "hvd.init()\nprint(len(converter))",
    """
    def train(rate=0.1):
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        with converter.make_torch_dataloader(
            batch_size=16, cur_shard=hvd.rank(), shard_count=hvd.size(), num_epochs=None
        ) as loader:
            rows = iter(loader)
            for _ in range(20 * len(converter) // (16 * hvd.size())):
                batch = next(rows)
                optimizer.zero_grad()
                loss = (model(batch["a"].reshape(-1, 1).float())[:, 0] - batch["y"]).square().mean()
                loss.backward()
                optimizer.step()
        return model.weight.item(), loss.item()
    """,
    "runner = HorovodRunner(np=NP)\nweight, loss = runner.run(train, rate=0.2)",
    "converter.delete()",
]


def collect_notes() -> dict[str, str]:
    """What old code gets said, on a rank: the text of each note by what the code does."""
    import keras
    import tensorflow as tf

    import horovod_runner.keras as hvd
    from horovod_runner.worker import old_keras as notes

    hvd.init()
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    wrapped.lr = 0.5
    assert float(wrapped.learning_rate.numpy()) == float(wrapped.lr.numpy()) == 0.5
    model = keras.Sequential([keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.1)

    @tf.function
    def traced() -> Any:
        return len(sgd.variables())

    def moved() -> Any:
        from keras.layers.normalization import BatchNormalization

        return BatchNormalization

    def lost() -> Any:
        from keras.preprocessing.image import ImageDataGenerator

        return ImageDataGenerator

    def short() -> Any:
        from keras.losses import mse

        return mse

    old = {
        "compile": lambda: model.compile("sgd", "mse", experimental_run_tf_function=False),
        "variables": lambda: sgd.variables(),
        "variables in a tf.function": traced,
        "lr=": lambda: keras.optimizers.Adam(lr=0.1),
        "lr": lambda: sgd.lr,
        "fit_generator": lambda: model.fit_generator(iter([])),
        "workers": lambda: model.fit(np.zeros((2, 1)), np.zeros(2), workers=4),
        "Session": lambda: tf.Session(),
        "ConfigProto": lambda: tf.ConfigProto(),
        "train.AdamOptimizer": lambda: tf.train.AdamOptimizer(),
        "get_session": lambda: keras.backend.get_session(),
        "tf.keras's get_session": lambda: tf.keras.backend.get_session(),
        "set_value": lambda: keras.backend.set_value(sgd.learning_rate, 0.1),
        "set_value of tf.keras": lambda: tf.keras.backend.set_value(sgd.learning_rate, 0.1),
        "mean": lambda: keras.backend.mean(1.0),
        "legacy": lambda: tf.keras.optimizers.legacy.Adam(),
        "moved": moved,
        "lost": lost,
        "short": short,
        "long": lambda: tf.keras.losses.mean_squared_error,
        "another argument": lambda: model.compile("sgd", "mse", other=1),
        "no old code": lambda: model.no_method_of_any_version(),
        "no old value": lambda: tf.reshape(tf.zeros(3), (2,)),
    }
    said = {}
    for name, call in old.items():
        try:
            call()
        except Exception as error:
            notes.add_note(error)
            said[name] = "\n".join(getattr(error, "__notes__", []))
    return said


@ON_TENSORFLOW
def test_each_old_name_has_a_note_with_its_line_and_both_ways_out() -> None:
    said = runner("tensorflow").run_all(collect_notes)[1]
    for name in ("no old code", "no old value", "another argument"):
        assert said.pop(name) == ""
    for name, note in said.items():
        assert f"HorovodRunner: {__file__}, line " in note, name
        assert 'HorovodRunner(env={"TF_USE_LEGACY_KERAS": "1"})' in note, name
    first = "sessions Session ConfigProto train.AdamOptimizer get_session tf.keras's get_session"
    for name, note in said.items():
        library = "TensorFlow 1" if name in first else "Keras 2"
        assert f"was written for {library}, and this rank has " in note, name
    for name, now in {
        "compile": "Write compile(...) without experimental_run_tf_function.",
        "variables": "without the parentheses",
        "variables in a tf.function": "return len(sgd.variables())\n",
        "lr=": "Keras 2's latest optimizers ignore lr=",
        "lr": "Write optimizer.learning_rate.",
        "fit_generator": "Write model.fit(...), with the same arguments.",
        "workers": "Write fit(...) without workers",
        "Session": "tf.compat.v1",
        "set_value": "optimizer.learning_rate = value",
        "set_value of tf.keras": "optimizer.learning_rate = value",
        "mean": "keras.ops",
        "lost": "from tensorflow.keras.preprocessing.image import ImageDataGenerator",
        "moved": "from keras.layers import",
        "short": "Write keras.losses.mean_squared_error.",
        "long": "Write tensorflow.keras.losses.MSE.",
    }.items():
        assert now in said[name], name


@pytest.fixture
def migrated(tmp_path: Path) -> Any:
    pytest.importorskip("libcst")

    def call(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        assert cli.main(["migrate", str(path), "--write"]) == 0
        return path

    return call


@ON_TENSORFLOW
def test_an_old_script_fails_with_a_note_and_trains_when_it_is_migrated(
    tmp_path: Path, migrated: Any
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    ranks = runner("tensorflow")
    with pytest.raises(ValueError, match="not recognized") as failed:
        ranks.run(find_main(str(path), "main"))
    (note, _) = failed.value.__notes__
    line = SCRIPT.splitlines().index("    opt = tf.keras.optimizers.SGD(lr=0.01 * hvd.size())") + 1
    assert f"{path}, line {line}, was written for Keras 2" in note
    assert isinstance(failed.value.__cause__, RankFailedError)
    cause = str(failed.value.__cause__)
    assert "failed: ValueError: Argument(s) not recognized: {'lr': 0.02}\n" in cause
    assert "| HorovodRunner: " in cause

    migrated("train.py", SCRIPT)
    assert "BroadcastGlobalVariablesCallback(0)" in path.read_text()
    one, two = ranks.run_all(find_main(str(path), "main"))
    assert one == two
    assert one[1] == pytest.approx(0.04)


@pytest.mark.cold
@pytest.mark.places("spark")
def test_an_old_notebook_trains_when_it_is_migrated(
    ranks: Ranks, spark: SparkSession, migrated: Any
) -> None:
    cells = [dedent(text).strip() for text in NOTEBOOK]
    notebook = [{"cell_type": "code", "source": text, "metadata": {}} for text in cells]
    path = migrated("old.ipynb", json.dumps({"cells": notebook, "nbformat": 4}))
    new = [cell["source"] for cell in json.loads(path.read_text())["cells"]]
    assert new[0] == cells[0]
    text = "\n".join(new[1:])
    assert "petastorm" not in text
    main = sys.modules["__main__"].__dict__
    variables = {**main, "spark": spark, "NP": 2, "__name__": "__main__"}
    exec(text, variables)
    assert variables["weight"] == pytest.approx(2.0, abs=0.2)
    assert variables["loss"] < 0.01
