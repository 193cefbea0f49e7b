"""What keeps Spark from starting on a host is named, with what to change."""

from __future__ import annotations

import pwd
import resource
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import LaunchError
from horovod_runner.host import control_groups
from horovod_runner.host.control_groups import MemoryLimit
from horovod_runner.launchers import sessions, spark_host
from horovod_runner.tools.commands import doctor


@pytest.fixture(autouse=True)
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which nothing is unusual."""
    monkeypatch.delenv("SPARK_LOCAL_HOSTNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    monkeypatch.setattr(control_groups, "process_limit", lambda: None)
    monkeypatch.setattr(control_groups, "memory", lambda: MemoryLimit(8 << 30, 4 << 30, True))


def test_an_ordinary_host_has_no_cause() -> None:
    assert spark_host.likely_causes() == []


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (cause,) = spark_host.likely_causes()
    assert "has no entry in /etc/passwd" in cause
    assert "/opt/entrypoint.sh" in cause


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_host", "a character that Spark's URLs do not allow"),
        ("unknown.invalid", "has no address, as with docker run --network none"),
    ],
)
def test_a_host_name_that_spark_cannot_use(
    monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    (cause,) = spark_host.likely_causes()
    assert cause.startswith(f"The host name {name} ")
    assert told in cause
    monkeypatch.setenv("SPARK_LOCAL_HOSTNAME", "localhost")  # Spark takes this one instead
    assert spark_host.likely_causes() == []


@pytest.mark.parametrize(
    ("limited", "number", "told"),
    [
        (resource.RLIMIT_NOFILE, 256, "may open 256 files"),
        (resource.RLIMIT_NPROC, 64, "may be 64 processes"),
    ],
)
def test_limits_of_a_process(
    monkeypatch: pytest.MonkeyPatch, limited: int, number: int, told: str
) -> None:
    def limits(which: int) -> tuple[int, int]:
        return (number, number) if which == limited else (-1, -1)

    monkeypatch.setattr(resource, "getrlimit", limits)
    (cause,) = spark_host.likely_causes()
    assert told in cause


def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "process_limit", lambda: 100)
    monkeypatch.setattr(control_groups, "memory", lambda: MemoryLimit(700_000_000, 1, True))
    processes, memory = spark_host.likely_causes()
    assert "may be 100 processes" in processes
    assert "may use 668 MiB of memory" in memory


class OutOfThreads:
    """A session whose Java process has started, and gets no further thread."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("can't start new thread")


def test_doctor_names_the_cause_of_a_spark_that_fails_after_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "open_session", lambda *_: OutOfThreads())
    monkeypatch.setattr(control_groups, "process_limit", lambda: 64)
    *_, found = doctor.examine_folder(str(tmp_path), "local[2]")
    assert (found.name, found.status) == ("Spark", "wrong")
    assert "after its start: RuntimeError: can't start new thread. There may be 64" in found.detail


class Builder:
    """Builds no session, as where Java does not start."""

    def __init__(self, error: str) -> None:
        self.chosen: list[tuple[str, ...]] = []
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def choose(*values: str) -> Builder:
            self.chosen.append((name, *values))
            return self

        return self.fail if name == "getOrCreate" else choose

    def fail(self) -> None:
        raise RuntimeError(self._error)


@pytest.mark.parametrize(
    ("error", "shown"),
    [("Java gateway process exited.\n\tat org.A.b(A.java:1)", "exited"), ("", "RuntimeError")],
)
def test_a_spark_that_does_not_start_has_its_likely_causes(
    error: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder(error)
    session = SimpleNamespace(active=builder.fail, builder=builder)
    monkeypatch.setitem(sys.modules, "pyspark.sql", SimpleNamespace(SparkSession=session))
    with pytest.raises(RuntimeError):  # nothing is known of it: Spark's own error
        sessions.find_session()
    with pytest.raises(LaunchError, match=rf"yarn: .*{shown}\. Check the master's URL\.$"):
        sessions.open_session("yarn", "mine", [("spark.a", "1"), ("spark.b", "2")])
    settings = [("config", "spark.a", "1"), ("config", "spark.b", "2")]
    assert builder.chosen == [("appName", "mine"), *settings, ("master", "yarn")]
    monkeypatch.setattr(control_groups, "process_limit", lambda: 100)
    with pytest.raises(LaunchError, match=rf"start: .*{shown}\. There may be 100 processes"):
        sessions.find_session()
    with pytest.raises(LaunchError, match=rf"yarn: .*{shown}\. There may be 100 processes"):
        sessions.open_session("yarn", "mine")
    # The Java of a Connect server is on another host.
    with pytest.raises(LaunchError, match=rf"sc://a: .*{shown}\. Check the master's URL\.$"):
        sessions.open_session("sc://a", "mine")
    assert builder.chosen[-1] == ("remote", "sc://a")
