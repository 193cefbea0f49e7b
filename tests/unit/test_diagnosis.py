"""What cannot travel to the ranks is named, with the way to it."""

from __future__ import annotations

import contextlib
import fractions
import functools
import socket
import sqlite3
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from horovod_runner import ClusterConfig, DebugConfig, HorovodRunner, SerializationError
from horovod_runner.common.by_value import by_value
from horovod_runner.common.options import Options
from horovod_runner.run import pickling
from horovod_runner.run.make_job import make_job


def refuse(main: Callable[..., Any], **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as caught:
        make(main, kwargs)
    return str(caught.value)


def make(main: Callable[..., Any], kwargs: dict[str, Any], warn_bytes: int = 1 << 30) -> bytes:
    options = Options(np=-1, debug_config=DebugConfig(warn_pickle_bytes=warn_bytes))
    return make_job(main, kwargs, 1, options).main


class Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_the_way_to_a_captured_object_is_named() -> None:
    cfg = Config(session=Config(lock=threading.Lock()), rate=0.1)

    def helper() -> Any:
        return cfg.session

    def main() -> Any:
        return helper()

    text = refuse(main)
    assert "main -> helper -> cfg.session.lock has the type _thread.lock (cannot pickle" in text
    assert "Create it inside main" in text


def test_objects_of_each_kind_are_named_with_what_to_do(tmp_path: Path) -> None:
    with (
        socket.socket() as connection,
        (tmp_path / "data").open("wb") as file,
        sqlite3.connect(":memory:") as database,
    ):
        cases = [
            (connection, "socket.socket", "connect inside main"),
            (file, "_io.BufferedWriter", "open the file inside main"),
            (database, "sqlite3.Connection", "connect inside main"),
            ((i for i in range(3)), "generator", "the function that makes it"),
            (threading.Event(), "threading.Event", "inside main"),
        ]
        for value, name, advice in cases:
            text = refuse(print, data=value)
            assert f"argument data has the type {name}" in text
            assert advice in text
    database.close()


def test_the_way_leads_through_containers_methods_partials_and_defaults() -> None:
    lock = threading.Lock()

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"a": [1, (2, lock)]}

        def main(self) -> None:
            return

    assert "main -> self.parts['a'][1][1] has the type" in refuse(Trainer().main)
    assert "-> key= has the type" in refuse(functools.partial(print, key=lock))
    assert "-> argument 1 has the type" in refuse(functools.partial(print, 1, lock))

    def with_default(own: Any = lock) -> Any:
        return own

    assert "with_default -> a default value has the type" in refuse(with_default)


def test_a_function_that_calls_itself_is_no_endless_way() -> None:
    lock = threading.Lock()

    def main(n: int) -> Any:
        return main(n - 1) if n else lock

    assert "main -> lock has the type" in refuse(main)


def test_a_stand_in_for_a_tensor_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        is_cuda = True

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    text = refuse(print, weights=[Tensor()])
    assert "argument weights[0] has the type" in text
    assert "a tensor on a GPU" in text


def test_a_module_that_raises_errors_of_its_own_goes_along() -> None:
    classes = pytest.importorskip("torch").classes
    with pytest.raises(RuntimeError):
        _ = classes.dtype.real
    assert make(lambda: classes, {})


def test_what_no_task_can_be_sent_is_refused_before_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pickling, "MAX_BYTES", 1000)
    table = {"x": np.zeros(1000)}
    text = refuse(lambda: table)
    assert "-> table['x'] has the type numpy.ndarray (8.0 kB, and a task" in text
    assert "files that the ranks can read" in text
    assert "a task can receive at most 2 GB" in refuse(print, text="x" * 2000)


def test_a_large_capture_warns_with_the_largest_part() -> None:
    images, labels = np.zeros(100_000), np.zeros(1000)

    def main() -> Any:
        return images, labels

    told = r" 80\d\.\d kB .*main -> images, .*numpy\.ndarray"
    with pytest.warns(UserWarning, match=told):
        make(main, {}, warn_bytes=100_000)
    runner = HorovodRunner(np=-1, debug_config=DebugConfig(warn_pickle_bytes=100_000))
    with pytest.warns(UserWarning, match=told) as warned:
        runner.run(main)
    assert warned[0].filename == __file__
    make(main, {}, warn_bytes=1_000_000)


def test_a_module_goes_along_with_each_of_two_runs_that_begin_together() -> None:
    with contextlib.ExitStack() as second:
        with by_value([fractions]):
            second.enter_context(by_value([fractions]))
        assert "fractions" in cloudpickle.list_registry_pickle_by_value()
    assert "fractions" not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_of_ones_own_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes.py").write_text("def cook(n):\n    return n * STIRS\nSTIRS = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import recipes

    sys.path.remove(str(tmp_path))
    runner = HorovodRunner(np=-1, cluster_config=ClusterConfig(ship_modules=[recipes]))
    assert runner.run(recipes.cook, n=5) == 15
    with pytest.raises(ModuleNotFoundError, match="recipes") as caught:
        HorovodRunner(np=-1).run(recipes.cook, n=5)
    assert "ClusterConfig(ship_modules=[recipes])" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match=r"ship_modules .* str: .*ship_modules="):
        HorovodRunner(np=-1, cluster_config=ClusterConfig(ship_modules=["recipes"]))
    with pytest.raises(TypeError, match=r"ship_modules .* None$"):
        HorovodRunner(np=-1, cluster_config=ClusterConfig(ship_modules=None))
