"""Keras 3 with Horovod: the ranks learn what one process would on the global batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import pytest

from horovod_runner import HorovodRunner, SyncError
from horovod_runner.sync import hash_weights
from tests.real.keras_scripts import keras_script, legacy_script, tensorflow_script
from tests.real.keras_training import CASES, EPOCHS, cases_of, train_all

# One run has all cases of a backend, and TensorFlow makes a graph for each.
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
# pytest-xdist's processes share no run.
TOGETHER = {name: pytest.mark.xdist_group(f"keras on {name}") for name in ("tensorflow", "torch")}
BACKENDS = [pytest.param(name, marks=TOGETHER[name]) for name in TOGETHER]
EACH = [
    pytest.param(backend, name, marks=TOGETHER[backend])
    for backend in TOGETHER
    for name in cases_of(backend)
]


@cache
def trained(backend: str) -> list[dict[str, Any]]:
    """All cases in one run: most of the time goes into the import."""
    return list(run(train_all, backend, {"names": cases_of(backend)}))


def run(
    main: Any, backend: str = "tensorflow", arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    return runner(backend, **options).run(main, **(arguments or {}))


def runner(backend: str, **options: Any) -> HorovodRunner:
    """With a fork server for all runs on this backend, which are in one process of pytest's."""
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", **options.pop("env", {})}
    return HorovodRunner(np=-2, env=env, **{"warm": True, **options})


@pytest.mark.parametrize(("backend", "name"), EACH)
def test_two_ranks_learn_what_one_process_learns(backend: str, name: str) -> None:
    first, second = (rank[name] for rank in trained(backend))
    assert len(first["ranks"]["weights"]) == EPOCHS
    for own, other in zip(first["ranks"]["weights"], second["ranks"]["weights"], strict=True):
        for one, two in zip(own, other, strict=True):
            numpy.testing.assert_array_equal(one, two)
    tolerance = CASES[name].tolerance
    assert first["ranks"]["losses"] == pytest.approx(first["one"]["losses"], abs=tolerance)
    assert second["ranks"]["losses"] == first["ranks"]["losses"]


@pytest.mark.parametrize("name", ["float16", "float16 wrapped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(backend: str, name: str) -> None:
    for rank in trained(backend):
        scales = [float(weights[-1]) for weights in rank[name]["ranks"]["weights"]]
        assert scales == [2.0**14, 2.0**13, 2.0**12]  # once in each epoch


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.unreduced])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_reduction_these_tests_fail(backend: str, name: str) -> None:
    first, second = (rank[name]["unreduced"] for rank in trained(backend))
    last = zip(first["weights"][-1], second["weights"][-1], strict=True)
    assert any((own != other).any() for own, other in last)
    one = trained(backend)[0][name]["one"]["losses"]
    assert first["losses"] != pytest.approx(one, abs=1e-5)


def seen(backend: str, behaviour: str) -> list[Any]:
    """What the ranks saw, of keras_behaviours."""
    return [rank["behaviours"][behaviour] for rank in trained(backend)]


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("different_numbers_of_batches", "batches an epoch: 4 on rank 0, 5 on rank 1"),
        ("different_numbers_that_keras_cannot_know", "in epoch 1: 4 on rank 0, 5 on rank 1"),
        ("different_numbers_with_the_average_in_front", "in epoch 1: 5 on rank 0, 4 on rank 1"),
        ("one_rank_stops_early", "as many epochs: 1 on rank 0, 2 on rank 1"),
        ("different_numbers_of_a_pipeline", "in epoch 1: 4 on rank 0, 5 on rank 1"),
        ("metrics_of_one_rank", "different metrics: 1 on rank 0, 2 on rank 1"),
        ("other_metrics_on_each_rank", "different metrics: 2 on rank 0, 2 on rank 1"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_ranks_are_told_on_all_of_them(backend: str, behaviour: str, told: str) -> None:
    for text in seen(backend, behaviour):
        assert text.startswith("ValueError: ")
        assert told in text


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("unknown_to_keras", "TypeError: Momentum is an optimizer of torch, not of Keras 3"),
        ("a_sum_with_predivide", "ValueError: gradient_predivide_factor splits an average"),
        ("passes_of_a_used_optimizer", "ValueError: backward_passes_per_step=2 needs room"),
        ("an_unknown_keras", "without averaging the gradients"),
        ("elastic", "HorovodRunner(..., max_restarts=2)"),
        ("global_variables", "broadcast_variables(model.weights, 0)"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_is_told_with_what_to_do(backend: str, behaviour: str, told: str) -> None:
    assert all(told in text for text in seen(backend, behaviour))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_is_a_plain_one_and_load_model_distributes_it(backend: str) -> None:
    for found in seen(backend, "saved_and_loaded"):
        assert found["written as"] == found["a plain one"]
        assert found["state"]
        assert "is distributed already" in found["is distributed"]
        assert found["loads plainly"]
        assert found["variables can be called"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_learning_rate_warms_up_and_the_momentum_follows(backend: str) -> None:
    for found in seen(backend, "warm_up"):
        warm = [0.08 * (1 + batch / 8) / 2 for batch in range(1, 9)]
        assert found["rates"] == pytest.approx(warm + [0.08] * 4)
        assert found["lr"] == pytest.approx([0.06, 0.08, 0.08])
        rates, kept = found["rates"], found["kept"]
        for batch in range(1, len(rates)):
            before, after = kept[2 * batch - 2 : 2 * batch]
            assert after / before == pytest.approx(rates[batch] / rates[batch - 1], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_learning_rate_follows_a_schedule(backend: str) -> None:
    for found in seen(backend, "schedule"):
        assert found["lr"] == pytest.approx([0.4, 0.4, 0.2, 0.2])
        assert "ExponentialDecay" in found["two"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_are_averaged_for_the_callbacks_after(backend: str) -> None:
    first, second = seen(backend, "averaged")
    assert first == second
    assert first["own"] == [5.0, 6.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_saves_what_is_better(backend: str) -> None:
    assert seen(backend, "best_models") == [["1-0.5.keras", "3-0.7.keras"], []]
    text, _ = seen(backend, "best_of_unknown_metric")
    assert "monitors 'val_acc', and this epoch has loss" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_reduced_gathered_and_broadcast(backend: str) -> None:
    expected = [[1.5, 2.0], [3.0, 4.0], 1.0, [[0], [1], [1]], [3.0], {"rank": 1}, 2, True]
    assert seen(backend, "values") == [expected, expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_rank_drops_out_units_of_its_own(backend: str) -> None:
    for (first, second), (own, other) in seen(backend, "dropout_differs"):
        assert first != second
        assert own == other


def apart(with_optimizer: bool) -> None:
    """Ranks that nobody has given the same weights."""
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    callbacks = [] if with_optimizer else [hvd.callbacks.ReportCallback()]
    model.compile(hvd.DistributedOptimizer(optimizer) if with_optimizer else optimizer, loss="mse")
    model.fit(numpy.ones((8, 3)), numpy.ones(8), verbose=0, callbacks=callbacks)


@TOGETHER["torch"]
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_ranks_that_train_apart_are_found_out(with_optimizer: bool) -> None:
    with pytest.raises(SyncError, match="rank 1 is the first that differs from rank 0"):
        run(apart, "torch", {"with_optimizer": with_optimizer}, check_sync="epoch")


def equal(ranks: Any) -> bool:
    return all((ranks[0] == other).all() for other in ranks[1:])


@TOGETHER["tensorflow"]
def test_a_script_for_horovods_keras_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(keras_script, check_sync="epoch")
    assert found["module"] == "horovod_runner.keras.optimizer"
    assert equal(found["weights"])
    assert found["history"]["accuracy"][-1] > 0.7
    out = capsys.readouterr().out
    assert out.count("horovod.tensorflow.keras does not average gradients on Keras 3") == 1


@TOGETHER["tensorflow"]
@pytest.mark.parametrize("optimizer_averages", [False, True], ids=["tape", "optimizer"])
def test_a_loop_for_tensorflow_runs_as_it_is(optimizer_averages: bool) -> None:
    found = run(tensorflow_script, arguments={"optimizer_averages": optimizer_averages})
    assert all(equal(variable) for variable in found["weights"])
    assert sum(found["losses"][-5:]) < sum(found["losses"][:5]) / 2


def test_keras_2_keeps_horovods_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(legacy_script, env={"TF_USE_LEGACY_KERAS": "1"}, warm=False)
    assert found["file"].endswith("horovod/tensorflow/keras/__init__.py")
    assert equal(found["weights"])
    out = capsys.readouterr().out
    assert "does not average" not in out
    assert out.count("epoch 2 of 2 ends: loss=") == 1


def own_class(keras: Any) -> Any:
    """A model that Keras cannot make anew: its class is not registered, and takes no config."""

    class Own(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = keras.layers.Dense(1)
            self.inside.build((None, 3))

        def call(self, x: Any) -> Any:
            return self.inside(x)

    model = Own()
    model.built = True
    return model


def fit_and_fail(epochs: int, subclassed: bool) -> list[Any]:
    """A fit that breaks off once, in its first attempt."""
    import keras

    import horovod_runner.keras as hvd
    from horovod_runner import current_attempt

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    if subclassed:
        model = own_class(keras)
    else:
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    x = numpy.random.default_rng(hvd.rank()).normal(size=(64, 3)).astype("float32")
    epochs_seen = []

    class Fails(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and current_attempt() == 1:
                raise OSError("no good")
            epochs_seen.append(epoch)

    model.fit(
        x,
        x.sum(1),
        batch_size=8,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.ReportCallback(every=4),
            Fails(),
        ],
    )
    iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    return [epochs_seen, iterations, [w.tolist() for w in model.get_weights()]]


@TOGETHER["torch"]
@pytest.mark.parametrize("subclassed", [False, True])
def test_a_fit_goes_on_where_it_broke_off_and_its_metrics_come_back(
    subclassed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = runner("torch", max_restarts=1, keep=None, progress=False)
    epochs, iterations, weights = fails.run(fit_and_fail, epochs=4, subclassed=subclassed)
    assert epochs == [2, 3]
    assert iterations == 4 * 8
    rows = fails.last_run.metrics.to_pylist()
    assert [(row["step"], row["epoch"]) for row in rows][-6:] == [
        *((20, 3), (24, 3), (24, 3)),
        *((28, 4), (32, 4), (32, 4)),
    ]
    assert all(row["loss"] > 0 for row in rows)
    assert [saved.step for saved in fails.last_run.checkpoints] == [8, 16, 24, 32]
    told = "cannot make a Own from what it would save of it" in capsys.readouterr().out
    assert told == subclassed
    if not subclassed:
        assert run(weights_of, "torch", {"path": fails.last_run.latest.path}) == weights


def weights_of(path: str) -> list[Any]:
    import keras

    return [weights.tolist() for weights in keras.models.load_model(path).get_weights()]


def test_weights_of_tensorflow_torch_and_numpy_are_compared_alike() -> None:
    import keras
    import tensorflow as tf
    import torch

    own = numpy.arange(6, dtype="float32").reshape(2, 3)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3, use_bias=False)])
    model.set_weights([own])
    module = torch.nn.Linear(2, 3, bias=False)
    module.weight.data = torch.from_numpy(own)
    hashed = [
        hash_weights(weights, 0, None)
        for weights in ([own], [tf.Variable(own, name="own")], model, module)
    ]
    assert len({tuple(each.digests) for each in hashed}) == 1
    names = [each.names[0] for each in hashed]
    assert names[0] == "0"
    assert [name.split("/")[-1] for name in names[1:]] == ["own:0", "kernel", "weight"]


def graphs_of_a_step() -> list[dict[str, int]]:
    """TensorFlow's operations in a step of the plain optimizer, and of ours."""
    from collections import Counter

    import keras
    import tensorflow as tf

    import horovod_runner.keras as hvd

    def operations(optimizer: Any) -> dict[str, int]:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        optimizer.build(model.trainable_variables)

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        graph = step.get_concrete_function(tf.TensorSpec((8, 4))).graph
        return dict(Counter(operation.type for operation in graph.get_operations()))

    hvd.init()
    made = keras.optimizers.Adam(), hvd.DistributedOptimizer(keras.optimizers.Adam())
    return [operations(optimizer) for optimizer in made]


def test_with_one_rank_a_step_is_the_plain_optimizers() -> None:
    plain, ours = HorovodRunner(np=-1, env={"TF_CPP_MIN_LOG_LEVEL": "2"}).run(graphs_of_a_step)
    assert plain == ours


def sparse_and_unequal() -> None:
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    layers = keras.layers
    model = keras.Sequential([layers.Input((5,)), layers.Embedding(30, 4), layers.Flatten()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")

    def batches() -> Any:
        for _ in range(4 + hvd.rank()):
            yield numpy.ones((8, 5), "int32"), numpy.ones((8, 20), "float32")

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(batches(), verbose=0, callbacks=callbacks)


@TOGETHER["tensorflow"]
def test_unequal_ranks_with_sparse_gradients_are_told_what_that_means() -> None:
    with pytest.raises(RuntimeError, match=r"which had 4 batches in epoch 1.*more batches"):
        run(sparse_and_unequal)
