"""Horovod's names on Keras 3: local layers, process sets, tapes, gradients that are computed.

The values are explained in keras_names: rank 0 has a gradient of 1, rank 1 of 2, rank 2 of 4.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.keras_names import process_sets
from tests.real.test_keras import BACKENDS, TOGETHER, results_of, run

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


# The weights a and b on both ranks. A local gradient is divided by the number of ranks.
LOCAL_LAYERS = {
    "layer": [[-0.5, -1.5], [-1.0, -1.5]],
    "eager": [[-0.5, -1.5], [-1.0, -1.5]],
    "registered": [[-0.5, -1.5], [-1.0, -1.5]],
    "loss scale": [[-0.5, -1.5], [-1.0, -1.5]],
    "not scaled": [[-1.0, -1.5], [-2.0, -1.5]],
    "sum": [[-0.5, -3.0], [-1.0, -3.0]],
    "passes": [[-2.0, -6.0], [-4.0, -6.0]],
    "no layers": [[-1.5, -1.5], [-1.5, -1.5]],
    "all layers": [[-0.5, -0.5], [-1.0, -1.0]],
}


@pytest.mark.parametrize("case", LOCAL_LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_local_layers_stay_on_their_rank(backend: str, case: str) -> None:
    weights = [result[case] for result in results_of("local_layers", backend)]
    assert weights == LOCAL_LAYERS[case]


@pytest.mark.parametrize("backend", BACKENDS)
def test_local_variables_and_their_momentums_are_not_broadcast(backend: str) -> None:
    first, second = results_of("local_layer_is_not_broadcast", backend)
    # b and its momentum come from rank 1, and its new value is each rank's.
    assert first == [1.0, 2.0, 10.0, 11.0, 5.0]
    assert second == [2.0, 2.0, 11.0, 11.0, 6.0]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("unbuilt_local_layer", "ValueError: the local layer 'rows' has no weights yet"),
        ("local_layer_by_name", "TypeError: local_layers must be layers of Keras 3, not 'rows'"),
        ("unregistered_process_set", "pass it to hvd.init(process_sets=[...])"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_supported_names_the_way_out(
    backend: str, behaviour: str, message: str
) -> None:
    assert all(message in text for text in results_of(behaviour, backend))


@TOGETHER["tensorflow"]
@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_computed_gradients_are_reduced_once(kind: str) -> None:
    for result in results_of("computed_gradients", "tensorflow"):
        assert result[kind] == [3.0, -3.0]
        assert result[f"{kind} in a graph"] == -6.0
        assert result[f"{kind} of a tape"] == 3.0
        assert result[f"{kind} at last"] == -12.0


@TOGETHER["tensorflow"]
def test_computed_gradients_are_accumulated() -> None:
    for result in results_of("computed_gradients", "tensorflow"):
        assert result["passes"] == [0.0, -1.5, -1.5, -3.0]


@TOGETHER["tensorflow"]
def test_gradients_that_were_computed_in_another_graph_are_refused() -> None:
    for text in results_of("computed_in_another_graph", "tensorflow"):
        assert "call both in the same tf.function" in text


@TOGETHER["torch"]
def test_on_torch_compute_gradients_names_what_to_call_instead() -> None:
    for text in results_of("computed_on_torch", "torch"):
        assert text.startswith("NotImplementedError: ")
        assert "loss.backward()" in text


@TOGETHER["torch"]
def test_a_horovod_with_nccl_trains_on_ranks_without_a_gpu() -> None:
    assert results_of("epochs_of_a_gpu_build", "torch") == [[-3.0, -3.0]] * 2


@TOGETHER["tensorflow"]
def test_horovods_tapes_know_local_layers_of_keras_3() -> None:
    for rank, result in enumerate(results_of("tapes", "tensorflow")):
        assert result["partial"] == [(1.0 + rank) / 2, 1.5]
        assert result["registered"] == [1.0 + rank, 1.5]
        assert result["local"] == [(True, (1.0 + rank) / 2)]
        assert result["others"] == [(True, 1.5)]


TAPES: dict[str, Any] = {
    "translated": [],  # no function of Horovod's, by AutoGraph
    "namesakes": [3.0, 6.0],  # Horovod would take them for one variable
    "listed": [3.0, 3.0],
    "listed in a graph": [3.0, 3.0],
    "number of groups": [1.5, 1.5],
    "experts": [1.0, 1.5, -1.0],  # no rank has a gradient for the last one
    "experts in a graph": [1.0, 1.5, 0.0],
    "optimizer": [-3.0, -3.0],
    "synchronized": True,
    "compressed": 0.5,
    "compressed group": [0.5, 0.5],
}


@TOGETHER["tensorflow"]
@pytest.mark.parametrize("part", TAPES)
def test_horovods_tapes_and_optimizer_work_with_keras_3(part: str) -> None:
    assert [result[part] for result in results_of("tapes", "tensorflow")] == [TAPES[part]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_ranks_of_a_process_set_reduce(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = run(process_sets, backend, np=-3, weight_check="epoch")
    assert "different weights" not in "".join(capsys.readouterr())  # those of a local layer are
    assert len(ranks) == 3
    for rank, result in enumerate(ranks):
        inside = rank != 1
        average, total = (-2.5, -5.0) if inside else (-2.0, -2.0)
        both = {name: [average] * 2 for name in ("average", "predivide", "groups", "bf16", "fp16")}
        expected: dict[str, Any] = {
            **both,
            "loss scale": [average] * 2,
            "sum": [total] * 2,
            "local": [[-0.5, -2.0, -2.0][rank], average],
            "global": pytest.approx([-7 / 3] * 2),
        }
        if backend == "tensorflow":
            expected["sparse"] = [-0.5, -2.0] if inside else [0.0, -2.0]
        assert result == expected
