"""What a state of Horovod Elastic has saved, as a commit keeps it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner.checkpoints.commits import Commit, Commits
from horovod_runner.errors import CheckpointError
from horovod_runner.integrations import horovod_elastic as horovod_states
from tests.savers import by_commit
from tests.stand_ins import as_rank


class Handler:
    """As Horovod's handler of a model: ``value`` is the model itself."""

    def __init__(self) -> None:
        self.value = object()
        self._saved_model_state = OrderedDict(weight=np.arange(3.0))


class State:
    """As Horovod's states, and with an attribute that its ``save`` binds."""

    def __init__(self, handlers: tuple[str, ...] = ("model",), **values: Any) -> None:
        self._handlers = {name: Handler() for name in handlers}
        self._saved_state = values
        self.unrelated = [1]
        self.copied: list[int] | None = None

    def save(self) -> None:
        self.copied = [1, 2]


def test_what_save_keeps_comes_back_with_its_types(tmp_path: Path) -> None:
    values = {
        "epoch": 3,
        "none": None,
        "words": ["a", ("b", 1.5)],
        "scores": np.arange(4),
        "counts": Counter("aab"),
        "seen": {1, 2},
        "folder": Path("/data"),
        "names": np.array(["x", None]),
        "by_pair": {(1, 2): "three"},
    }
    state = State(**values)
    before = dict(vars(state))
    state.save()
    kept = horovod_states._saved(state, before)
    assert set(kept) == {
        "/copied",
        "model/_saved_model_state",
        *(f"/_saved_state/{name}" for name in values),
    }
    pickled = {path.rpartition("/")[2] for path, (kind, _) in kept.items() if kind}
    assert pickled == {"counts", "seen", "folder", "names", "by_pair"}

    other = State()
    other._handlers["model"]._saved_model_state.clear()
    restored_commit, _ = by_commit({"kept": kept}, tmp_path)
    horovod_states._put(other, restored_commit["kept"])
    assert other.copied == [1, 2]
    assert other._handlers["model"]._saved_model_state["weight"].tolist() == [0, 1, 2]
    restored = other._saved_state
    assert {name: type(value) for name, value in restored.items()} == {
        name: type(value) for name, value in values.items()
    }
    for name in ("scores", "names"):
        assert restored.pop(name).tolist() == values.pop(name).tolist()  # type: ignore[attr-defined]
    assert restored == values


def test_a_state_without_a_model_that_was_committed_is_refused() -> None:
    state = State()
    kept = horovod_states._saved(state, vars(state))
    with pytest.raises(CheckpointError, match=r"'model'.*hvd\.elastic"):
        horovod_states._put(State(handlers=()), kept)


def test_a_commit_of_another_kind_is_refused(tmp_path: Path) -> None:
    Commits(str(tmp_path)).write({"model": 1}, Commit(1, 1, 7, 1))
    refused = pytest.raises(CheckpointError, match=r"step 7\b.* state\.commit\(\)")
    with as_rank(0, 1, commits=str(tmp_path)), refused:
        horovod_states._States().load()
