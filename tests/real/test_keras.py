"""Keras 3 with Horovod: two ranks learn the same as one process on the global batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from horovod_runner import HorovodRunner, SyncError
from horovod_runner.common.options import grouped
from horovod_runner.integrations.training.keras import set_seed
from horovod_runner.wire.job_file import NO_CHECKPOINTS
from horovod_runner.wire.marker import Marker
from horovod_runner.worker.weights import hash_weights
from tests import suites
from tests.preload import keras_on
from tests.real import keras_feeds
from tests.real.keras_behaviours import BEHAVIOURS, behave
from tests.real.keras_names import names_of
from tests.real.keras_scripts import keras_script, legacy_script, tensorflow_script
from tests.real.keras_training import CASES, EPOCHS, cases_of, train_all
from tests.stand_ins import as_rank

# The whole suite's run trains all cases of a backend: TensorFlow builds a graph for each of them,
# which takes a minute.
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
# pytest-xdist's processes do not share runs.
TOGETHER = {name: pytest.mark.xdist_group(f"keras on {name}") for name in ("tensorflow", "torch")}
BACKENDS = [pytest.param(name, marks=TOGETHER[name]) for name in TOGETHER]
CASES_BY_BACKEND = [
    pytest.param(backend, name, marks=TOGETHER[backend])
    for backend in TOGETHER
    for name in cases_of(backend)
]

ROWS = numpy.array([[1.0, 0.0], [2.0, 5.0], [3.0, 4.0], [20.0, -9.0]], "float32")

Trained = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Trained:
    """The results of a backend's cases by rank, in one run, because imports take most of the time.

    Only those that a test of this session asks for are trained.
    """
    asked = {
        (item.callspec.params.get("backend"), item.callspec.params.get("name"))
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }

    @cache
    def trained(backend: str) -> list[dict[str, Any]]:
        names = [name for name in cases_of(backend) if (backend, name) in asked]
        return list(run(train_all, backend, {"names": names}))

    return trained


@cache
def behaved(backend: str, *names: str) -> list[dict[str, Any]]:
    """The results of functions of keras_behaviours and keras_names by rank, in one run."""
    return list(run(behave_all, backend, {"names": names}))


def behave_all(names: tuple[str, ...]) -> list[dict[str, Any]]:
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    functions = BEHAVIOURS | names_of(keras.backend.backend())
    chosen = {name: each for name, each in functions.items() if not names or name in names}
    return list(hvd.allgather_object(behave(chosen)))


def run(
    main: Any, backend: str = "tensorflow", arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    return runner(backend, **options).run(main, **(arguments or {}))


def runner(backend: str, **options: Any) -> HorovodRunner:
    """A runner on two ranks; all runs of a backend share one fork server."""
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", **options.pop("env", {})}
    options = {"preload_frameworks": keras_on(backend), **options}
    return HorovodRunner(np=options.pop("np", -2), env=env, **grouped(options))


# Slow where it is the first of its backend: it trains all cases that tests of this session ask for.
@pytest.mark.parametrize(("backend", "name"), CASES_BY_BACKEND)
def test_two_ranks_learn_what_one_process_learns(trained: Trained, backend: str, name: str) -> None:
    first, second = (rank[name] for rank in trained(backend))
    assert len(first["ranks"]["weights"]) == EPOCHS
    for epoch in zip(first["ranks"]["weights"], second["ranks"]["weights"], strict=True):
        for one, two in zip(*epoch, strict=True):
            numpy.testing.assert_array_equal(one, two)
    tolerance = CASES[name].tolerance
    assert first["ranks"]["losses"] == pytest.approx(first["one"]["losses"], abs=tolerance)
    assert second["ranks"]["losses"] == first["ranks"]["losses"]


@pytest.mark.parametrize("name", ["float16", "float16 wrapped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    trained: Trained, backend: str, name: str
) -> None:
    for rank in trained(backend):
        scales = [float(weights[-1]) for weights in rank[name]["ranks"]["weights"]]
        assert scales == [2.0**14, 2.0**13, 2.0**12]  # once in each epoch


def results_of(behaviour: str, backend: str) -> list[Any]:
    """The results of a function of keras_behaviours or keras_names, by rank."""
    names = [behaviour] if suites.running == "quick" else []  # with few tests of these
    return [rank[behaviour] for rank in behaved(backend, *names)]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("different_numbers_of_batches", "batches per epoch: 4 on rank 0, 5 on rank 1"),
        ("different_numbers_unknown_to_keras", "in epoch 1: 4 on rank 0, 5 on rank 1"),
        ("different_numbers_with_the_average_first", "in epoch 1: 5 on rank 0, 4 on rank 1"),
        ("one_rank_stops_early", "different numbers of epochs: 1 on rank 0, 2 on rank 1"),
        ("different_numbers_of_a_pipeline", "in epoch 1: 4 on rank 0, 5 on rank 1"),
        ("metrics_of_one_rank", "different metrics: 1 on rank 0, 2 on rank 1"),
        ("different_metrics_on_each_rank", "different metrics: 2 on rank 0, 2 on rank 1"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_ranks_are_an_error_on_all_ranks(
    backend: str, behaviour: str, message: str
) -> None:
    for text in results_of(behaviour, backend):
        assert text.startswith("ValueError: ")
        assert message in text


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("unknown_to_keras", "TypeError: Momentum is an optimizer of torch, not of Keras 3"),
        (
            "passes_of_a_built_optimizer",
            "ValueError: backward_passes_per_step=2 needs extra variables",
        ),
        ("an_unknown_keras", "without averaging the gradients"),
        ("state_of_an_unbuilt_model", "call model.build(input_shape)"),
        ("state_without_an_optimizer", "call model.compile before KerasState(model)"),
        ("global_variables", "broadcast_variables(model.weights, 0)"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_name_the_cause_or_the_replacement(
    backend: str, behaviour: str, message: str
) -> None:
    assert all(message in text for text in results_of(behaviour, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_is_plain_and_load_model_distributes_its_optimizer(backend: str) -> None:
    for result in results_of("saved_and_loaded", backend):
        assert result["config in the file"] == result["config of a plain optimizer"]
        assert result["state is restored"]
        assert "is distributed already" in result["second call"]
        assert result["loads without Horovod"]
        assert result["variables can be called"]


def train_compiled() -> list[Any]:
    """On each rank, of two optimizers: their names in a file, and the weights, compiled or not."""
    from functools import partial

    import keras
    import numpy as np
    import torch

    import horovod_runner.keras as hvd

    # Tests how torch.compile traces a step; the backend that writes C++ is slow and not needed.
    torch.compile = partial(torch.compile, backend="eager")

    @keras.saving.register_keras_serializable("tests")
    class Half(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            super().update_step(gradient, variable, rate / 2)

    def weights(kind: Any, *, compiled: bool) -> tuple[Any, list[float]]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = hvd.DistributedOptimizer(kind(0.1))
        model.compile(optimizer=optimizer, loss="mse", jit_compile=compiled)
        rows = np.random.default_rng(hvd.rank()).normal(size=(32, 3)).astype("float32")
        model.fit(rows, rows[:, :2], batch_size=8, verbose=0, shuffle=False)
        saved = keras.saving.serialize_keras_object(optimizer)
        plain = keras.saving.serialize_keras_object(kind(0.1))
        same = all(saved[name] == plain[name] for name in ("class_name", "registered_name"))
        restored = keras.saving.deserialize_keras_object(saved)
        return same and type(restored) is type(kind(0.1)), model.get_weights()[0].ravel().tolist()

    hvd.init()
    found = [
        [weights(kind, compiled=compiled) for compiled in (False, True)]
        for kind in (keras.optimizers.Adam, Half)
    ]
    return list(hvd.allgather_object(found))


def test_torch_averages_gradients_in_a_compiled_training() -> None:
    first, second = run(train_compiled, "torch")
    assert first == second
    for (known, plain), (known_compiled, compiled) in first:
        assert known
        assert known_compiled
        assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_learning_rate_warms_up_and_the_momentum_follows(backend: str) -> None:
    for result in results_of("warm_up", backend):
        warm = [0.08 * (1 + batch / 8) / 2 for batch in range(1, 9)]
        assert result["rates"] == pytest.approx(warm + [0.08] * 4)
        assert result["lr"] == pytest.approx([0.06, 0.08, 0.08])
        rates, momentums = result["rates"], result["momentums"]
        for batch in range(1, len(rates)):
            before, after = momentums[2 * batch - 2 : 2 * batch]
            assert after / before == pytest.approx(rates[batch] / rates[batch - 1], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_learning_rate_follows_a_schedule(backend: str) -> None:
    for result in results_of("schedule", backend):
        assert result["lr"] == pytest.approx([0.4, 0.4, 0.2, 0.2])
        assert "ExponentialDecay" in result["error"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_are_averaged_for_later_callbacks(backend: str) -> None:
    first, second = results_of("averaged", backend)
    assert first == second
    assert first["extra"] == [5.0, 6.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_saves_better_models(backend: str) -> None:
    saved = ["2-0.5.keras", "5-0.7.keras", "7-0.8.keras"]
    assert results_of("best_models", backend) == [saved, []]


def test_a_fit_that_goes_on_saves_no_model_worse_than_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horovod_runner.integrations.keras import callbacks

    rank_0 = SimpleNamespace(hvd=SimpleNamespace(rank=lambda: 0))
    monkeypatch.setattr(callbacks, "collectives", lambda: rank_0)
    markers = tuple(
        Marker(f"{loss}", 1, 1, "keras", 1, "", "", metrics={"loss": loss})
        for loss in (numpy.nan, 0.7, 0.5)
    )
    plan = NO_CHECKPOINTS._replace(resume=markers)
    for begin, expected in ((3, [0.4]), (0, [0.6, 0.4])):
        best = callbacks.BestModelCheckpoint("loss")
        best.set_model(SimpleNamespace(optimizer=SimpleNamespace(iterations=1)))
        with as_rank(0, 1, checkpoints=plan) as rank:
            best.on_train_begin()
            for epoch, loss in ((begin, 0.6), (begin + 1, 0.4)):
                best.on_epoch_begin(epoch)
                best.on_epoch_end(epoch, {"loss": loss})
        assert [metrics["loss"] for _, _, metrics in rank.checkpoints_saved] == expected


def test_metrics_that_are_no_numbers_are_logged_and_not_reported() -> None:
    """As F1Score(average=None), and with the names of a report's own columns."""
    from horovod_runner.integrations.keras import callbacks

    logs = {"loss": 0.5, "f1": numpy.array([0.25, 1.0]), "time": 1.0, "step": 2, "total steps": 3}
    with as_rank(0, 1) as rank:
        for callback in (callbacks.ReportCallback(every=1), callbacks.LogCallback(True)):
            callback.set_params({})
            callback.on_train_batch_end(0, logs)
    assert rank.reported == [({"loss": 0.5}, 1, 1, None)]
    assert "loss=0.5, f1=[0.25 1. ], time=1" in rank.sent[0].text


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_reduced_gathered_and_broadcast(backend: str) -> None:
    expected = [[1.5, 2.0], [3.0, 4.0], [1.5, 2.0], 1.0, [[0], [1], [1]], [3.0]]
    parts = [[3.0], [6.0]], [[10.0]]
    assert results_of("values", backend) == [
        [*expected, part, {"rank": 1}, 2, True] for part in parts
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_share_numbers_that_cannot_be_divided_by_them(backend: str) -> None:
    assert results_of("three_numbers_as_bfloat16", backend) == [[-1.5, -3.0, -6.0]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_drop_out_different_units(backend: str) -> None:
    for seeds, weights in results_of("dropout_differs", backend):
        assert seeds[0] != seeds[1]
        assert weights[0] == weights[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_decide_by_the_mean_of_the_ranks(backend: str) -> None:
    # The means are 1.5, 1.25, 1.75 and 2.25.
    for decided in results_of("decided_together", backend):
        assert len(decided) == 2, decided
        epochs, rate = decided
        assert epochs == [0, 1, 2, 3]
        assert rate == pytest.approx(0.1)


@cache
def fed(backend: str) -> list[dict[str, Any]]:
    """The results of keras_feeds by rank, in one run."""
    rows = keras_feeds.table()
    data = {"train": rows, "valid": rows[: keras_feeds.VALID], "few": rows[:1]}
    return list(run(keras_feeds.run_all, backend, data))


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_counts_each_row_of_a_feed_once(backend: str) -> None:
    for rank in fed(backend):
        for feed in (name for name in rank["fits"] if name != "one process"):
            fit = rank["fits"][feed]
            last = {name: fit["seen"][-1][name] for name in fit["one"]}
            assert last == pytest.approx(fit["one"], abs=1e-6), feed
            assert {"val_loss", "val_accuracy", "val_auc", "val_precision"} == {*last}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_callbacks_does_not_matter(backend: str) -> None:
    first, second = (rank["fits"] for rank in fed(backend))
    for feed in (name for name in first if name != "one process"):
        # The first callback has seen the averages, and those behind it have decided by them.
        assert first[feed]["seen"] == second[feed]["seen"]
        assert first[feed]["epochs"] == second[feed]["epochs"] == 2
        assert first[feed]["rate"] == second[feed]["rate"] == pytest.approx(0.01)
        assert first[feed]["weights"] == second[feed]["weights"]
        assert first[feed]["shuffle"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_on_a_feed_learns_what_one_process_learns(backend: str) -> None:
    for rank in fed(backend):
        for feed in (name for name in rank["fits"] if "global batch" in name):
            for weight, alone in zip(
                rank["fits"][feed]["weights"], rank["fits"]["one process"], strict=True
            ):
                numpy.testing.assert_allclose(weight, alone, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_adapt_to_the_rows_of_all_ranks(backend: str) -> None:
    for rank in fed(backend):
        for name, (here, alone) in rank["adapted"].items():
            for values, expected in zip(here, alone, strict=True):
                if len(values) and isinstance(values[0], str):
                    assert values == expected, name
                else:
                    numpy.testing.assert_allclose(values, expected, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("part", "data"),
    [
        (None, ROWS),
        (None, [ROWS[:1], ROWS[1:]]),
        (None, [(ROWS[:2], None), (ROWS[2:], None)]),
        (None, iter([{"x": ROWS[:1]}, {"x": ROWS[1:]}])),
        ("x", [{"x": ROWS[:3], "z": None}, {"x": ROWS[3:], "z": None}]),
    ],
)
def test_a_layer_adapts_to_arrays_and_to_batches(part: str | None, data: Any) -> None:
    import keras

    import horovod_runner.keras as hvd

    layer = hvd.adapt(keras.layers.Normalization(), data, part)
    assert numpy.ravel(layer.mean) == pytest.approx(ROWS.mean(0))
    assert numpy.ravel(layer.variance) == pytest.approx(ROWS.var(0))


@pytest.mark.parametrize(
    ("part", "data", "error"),
    [
        (
            None,
            [ROWS, ROWS[:, :1]],
            r"rows of shape \(2,\) and of shape \(1,\): Normalization needs",
        ),
        (None, ROWS[:0], "adapt found no rows for scale"),
        (None, [{"x": ROWS, "z": ROWS}], "part=None, and a batch has the parts 'x', 'z': name one"),
        ("y", [{"x": ROWS, "z": ROWS}], "part='y', and a batch has the parts 'x', 'z': name one"),
    ],
)
def test_adapt_says_what_is_wrong_with_rows(part: str | None, data: Any, error: str) -> None:
    import keras

    import horovod_runner.keras as hvd

    with pytest.raises(ValueError, match=error):
        hvd.adapt(keras.layers.Normalization(name="scale"), data, part)


def test_adapt_says_what_is_wrong_with_a_layer() -> None:
    import keras

    import horovod_runner.keras as hvd

    with pytest.raises(TypeError, match="adapt does not know Dense"):
        hvd.adapt(keras.layers.Dense(1), ROWS)
    with pytest.raises(ValueError, match="has its statistics already, by vocabulary="):
        hvd.adapt(keras.layers.StringLookup(vocabulary=["a"]), ["a"])


@TOGETHER["tensorflow"]
def test_a_network_that_begins_with_text_trains_and_is_saved() -> None:
    first, second = (rank["text"] for rank in fed("tensorflow"))
    assert first == second
    assert first["loss"][-1] < first["loss"][0]
    assert first["same"]


def fit_without_broadcast(with_optimizer: bool) -> None:
    """Train on ranks with different weights."""
    import keras

    import horovod_runner.keras as hvd

    hvd.init()
    set_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    callbacks = [] if with_optimizer else [hvd.callbacks.ReportCallback()]
    model.compile(hvd.DistributedOptimizer(optimizer) if with_optimizer else optimizer, loss="mse")
    model.fit(numpy.ones((8, 3)), numpy.ones(8), verbose=0, callbacks=callbacks)


@TOGETHER["torch"]
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_different_weights_are_detected(with_optimizer: bool) -> None:
    with pytest.raises(SyncError, match=r"rank 1 .*rank 0, .*/kernel "):
        run(
            fit_without_broadcast, "torch", {"with_optimizer": with_optimizer}, weight_check="epoch"
        )


def equal(ranks: Any) -> bool:
    return all((ranks[0] == other).all() for other in ranks[1:])


@TOGETHER["tensorflow"]
def test_a_script_for_horovods_keras_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(keras_script, weight_check="epoch")
    assert result["module"] == "horovod_runner.integrations.keras.distributed.mixin"
    assert equal(result["weights"])
    assert result["history"]["accuracy"][-1] > 0.7
    out = capsys.readouterr().out
    assert out.count("horovod.tensorflow.keras does not average gradients on Keras 3") == 1


@TOGETHER["tensorflow"]
@pytest.mark.parametrize("optimizer_averages", [False, True], ids=["tape", "optimizer"])
def test_a_custom_tensorflow_loop_runs_unchanged(optimizer_averages: bool) -> None:
    result = run(tensorflow_script, arguments={"optimizer_averages": optimizer_averages})
    assert all(equal(variable) for variable in result["weights"])
    first, second = result["seeds"]  # of the dropout
    assert first != second
    assert sum(result["losses"][-5:]) < sum(result["losses"][:5]) / 2
    # AutoGraph would translate hundreds of Horovod's functions, for most of the first step's time.
    assert {*result["translated"]} == {tensorflow_script.__module__}


def test_keras_2_uses_horovods_keras(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"env": {"TF_USE_LEGACY_KERAS": "1"}, "preload_frameworks": ["horovod.tensorflow"]}
    result = run(legacy_script, **options)
    assert result["file"].endswith("horovod/tensorflow/keras/__init__.py")
    assert not equal(result["local weights"])
    assert result["old names"] == (pytest.approx(0.05), 1)  # one variable: the number of steps
    assert equal(result["weights"])
    out = capsys.readouterr().out
    assert "does not average" not in out
    assert out.count("epoch 2 of 2 ends: loss=") == 1


def custom_model(keras: Any) -> Any:
    """A model without weights before its first batch, which Keras cannot recreate either."""

    class Custom(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.inside(x)

    return Custom()


def fit_and_fail(epochs: int, subclassed: bool, forgetful: bool = False) -> list[Any]:
    """A fit that fails in its first attempt; then a second fit, of two epochs."""
    import keras

    import horovod_runner.keras as hvd
    from horovod_runner import current_attempt

    hvd.init()
    set_seed(hvd.rank())
    if subclassed:
        model = custom_model(keras)
    elif forgetful:

        class Forgetful(keras.Sequential):  # type: ignore[misc, name-defined]
            """As of a Keras that has given its attribute another name."""

            _initial_epoch = property(lambda self: None, lambda self, value: None)

        model = Forgetful([keras.layers.Input((3,)), keras.layers.Dense(1)])
    else:
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    x = numpy.random.default_rng(hvd.rank()).normal(size=(64, 3)).astype("float32")
    epochs_seen = []

    class Fail(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and current_attempt() == 1:
                hvd.allgather_object(None)  # a barrier: rank 0 has begun to write the checkpoint
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
            Fail(),
        ],
    )
    iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    weights = [w.tolist() for w in model.get_weights()]
    model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=[Fail()])
    return [epochs_seen, iterations, weights]


@pytest.mark.parametrize(
    ("backend", "subclassed"),
    [
        pytest.param("torch", False, marks=TOGETHER["torch"], id="False"),
        pytest.param("torch", True, marks=TOGETHER["torch"], id="True"),
        pytest.param("tensorflow", True, marks=TOGETHER["tensorflow"], id="tensorflow-True"),
    ],
)
def test_a_fit_resumes_after_a_failure_and_reports_its_metrics(
    backend: str, subclassed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = runner(backend, max_restarts=1, num_to_keep=None, progress=False)
    epochs, iterations, weights = failing.run(fit_and_fail, epochs=4, subclassed=subclassed)
    assert epochs == [2, 3, 0, 1]  # the second fit resumes nothing
    assert iterations == 4 * 8
    rows = failing.last_run.metrics.to_pylist()
    assert [(row["step"], row["epoch"]) for row in rows][-6:] == [
        *((20, 3), (24, 3), (24, 3)),
        *((28, 4), (32, 4), (32, 4)),
    ]
    assert all(row["loss"] > 0 for row in rows)
    assert [saved.step for saved in failing.last_run.checkpoints] == [8, 16, 24, 32]
    warned = "cannot recreate the model Custom from its config" in capsys.readouterr().out
    assert warned == subclassed
    if not subclassed:
        assert (
            run(weights_of, backend, {"path": failing.last_run.latest_checkpoint.path}) == weights
        )


@TOGETHER["torch"]
def test_a_keras_that_does_not_resume_where_it_is_told_to_ends_the_run() -> None:
    failing = runner("torch", max_restarts=1, progress=False)
    with pytest.raises(RuntimeError, match=r"epoch 1,.* 2 epochs.*initial_epoch=2"):
        failing.run(fit_and_fail, epochs=4, subclassed=False, forgetful=True)


def weights_of(path: str) -> list[Any]:
    import keras

    return [weights.tolist() for weights in keras.models.load_model(path).get_weights()]


def test_equal_weights_of_tensorflow_torch_and_numpy_have_equal_hashes() -> None:
    import keras
    import tensorflow as tf
    import torch

    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3, use_bias=False)])
    model.set_weights([array])
    module = torch.nn.Linear(2, 3, bias=False)
    module.weight.data = torch.from_numpy(array)
    hashed = [
        hash_weights(weights, 0, None)
        for weights in ([array], [tf.Variable(array, name="array")], model, module)
    ]
    assert len({tuple(hashes.digests) for hashes in hashed}) == 1
    names = [hashes.names[0] for hashes in hashed]
    assert names[0] == "0"
    assert [name.split("/")[-1] for name in names[1:]] == ["array:0", "kernel", "weight"]


def graphs_of_a_step() -> list[dict[str, int]]:
    """Count TensorFlow's operations in a step of the plain optimizer, and of ours."""
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
    optimizers = keras.optimizers.Adam(), hvd.DistributedOptimizer(keras.optimizers.Adam())
    return [operations(optimizer) for optimizer in optimizers]


def test_with_one_rank_a_step_has_the_operations_of_the_plain_optimizer() -> None:
    plain, ours = runner("tensorflow", np=-1, preload_frameworks=False).run(graphs_of_a_step)
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
def test_the_error_for_unequal_ranks_with_sparse_gradients_names_the_cause() -> None:
    with pytest.raises(RuntimeError, match=r" 4 batches .*epoch 1\. .*more batches"):
        run(sparse_and_unequal)
