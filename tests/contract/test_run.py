"""What a run does, over both launchers: values, environment, output, failures."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import horovod_runner.sparkdl
from horovod_runner import (
    HorovodRunner,
    LaunchError,
    RankFailedError,
    SerializationError,
    log_to_driver,
)
from horovod_runner.host.processes import wait_for_end
from horovod_runner.worker.imports import replacements
from tests import programs
from tests.conftest import Ranks
from tests.places import EVERYWHERE

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


class BadLabelError(ValueError):
    """An exception of the user's own."""

    def __init__(self, label: int) -> None:
        super().__init__(f"bad label {label}")
        self.label = label

    def __reduce__(self) -> tuple[Any, ...]:
        return BadLabelError, (self.label,)


def environment(name: str) -> str:
    return os.environ.get(name, "")


@pytest.mark.places(*EVERYWHERE)
def test_returns_the_value_of_rank_0(ranks: Ranks) -> None:
    def main(offset: int) -> Any:
        rank = int(os.environ["HOROVOD_RANK"])
        return threading.Lock() if rank else offset + rank  # which cannot be pickled

    assert ranks.run(3, main, offset=40) == 40


def test_captures_closures_and_keyword_arguments_in_a_process_of_its_own(ranks: Ranks) -> None:
    weights = {"a": [1.0, 2.0]}

    def main(**kwargs: Any) -> Any:
        return weights, kwargs, os.getpid(), os.environ["HOROVOD_SIZE"]

    *captured, pid, size = ranks.run(1, main, learning_rate=0.1, layers=(3, 4))
    assert captured == [weights, {"learning_rate": 0.1, "layers": (3, 4)}]
    assert pid != os.getpid()
    assert size == "1"


@pytest.mark.places(*EVERYWHERE)
def test_imports_the_users_own_modules(ranks: Ranks) -> None:
    # Pickled by name: the ranks have to import this very test module.
    assert ranks.run(1, environment, name="HOROVOD_RANK") == "0"


@pytest.mark.places(*EVERYWHERE)
def test_ranks_know_their_place_in_horovods_and_in_torchs_terms(ranks: Ranks) -> None:
    names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"]
    names += ["HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"]
    names += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]

    def main() -> None:
        log_to_driver(" ".join(os.environ[name] for name in names))

    lines = _run_and_collect(ranks, 3, main)
    assert sorted(lines) == [f"{r} 3 {r} 3 0 1 {r} 3 {r} 3" for r in range(3)]


def _run_and_collect(ranks: Ranks, size: int, main: Any, **options: Any) -> list[str]:
    """Run; returns the lines that this process has printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        ranks.run(size, main, options)
    return output.getvalue().splitlines()


@pytest.mark.places(*EVERYWHERE)
def test_shows_log_to_driver_and_nothing_else_by_default(ranks: Ranks) -> None:
    def main() -> None:
        print("printed")
        log_to_driver("logged")

    lines = _run_and_collect(ranks, 2, main)
    if ranks.place == "local":  # np < 0: what the ranks print belongs to the cell
        assert sorted(lines) == ["[0] printed", "[1] printed", "logged", "logged"]
    else:
        assert lines == ["logged", "logged"]


def test_shows_all_output_with_its_rank_when_asked(ranks: Ranks) -> None:
    """That of native code and of children, too."""

    def main() -> None:
        print(f"line of {os.environ['HOROVOD_RANK']}", flush=True)
        os.write(1, b"from a descriptor\n")
        subprocess.run(["/bin/echo", "from a child"], check=True)

    lines = _run_and_collect(ranks, 2, main, driver_log_verbosity="all")
    for rank in range(2):
        of_rank = [line for line in lines if line.startswith(f"[{rank}] ")]
        texts = (f"line of {rank}", "from a descriptor", "from a child")
        assert of_rank == [f"[{rank}] {text}" for text in texts]


def test_long_and_odd_texts_arrive_whole(ranks: Ranks) -> None:
    texts = ["x" * 300_000, "tab\tand ünïcödé 🚀", ""]

    def main() -> None:
        for text in texts:
            log_to_driver(text)

    lines = _run_and_collect(ranks, 1, main)
    assert lines == texts


def test_many_lines_from_each_rank_arrive_complete_and_in_order(ranks: Ranks) -> None:
    count = 30_000

    def main() -> None:
        rank = os.environ["HOROVOD_RANK"]
        for number in range(count):
            print(number)
            log_to_driver(f"log {rank} {number}")

    lines = _run_and_collect(ranks, 2, main, driver_log_verbosity="all")
    for rank in range(2):
        prefix = f"[{rank}] "
        printed = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert printed == [str(number) for number in range(count)]
        prefix = f"log {rank} "
        logged = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert logged == [str(number) for number in range(count)]


@pytest.mark.places(*EVERYWHERE)
def test_env_reaches_every_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAVOUR", "the driver's")

    def main() -> Any:
        return os.environ["FLAVOUR"], os.environ["OMP_NUM_THREADS"]

    environment = {"FLAVOUR": "sweet", "OMP_NUM_THREADS": "7"}
    assert ranks.run(2, main, {"env": environment}) == ("sweet", "7")


@pytest.mark.places("local", "slurm")
def test_a_rank_does_not_see_what_another_launcher_told_the_driver(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell of an interactive allocation: trainers would take it for theirs."""
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID", "TF_CONFIG"):
        monkeypatch.setenv(name, "3")

    def main() -> set[str]:
        begins = ("SLURM_P", "SLURM_NTASKS", "OMPI_", "TORCHELASTIC_", "TF_CONFIG", "PALS_")
        return {name for name in os.environ if name.startswith(begins)}

    seen = ranks.run(2, main, {"env": {"PALS_RANKID": "on purpose"}})
    of_slurm = {name for name in seen if name.startswith("SLURM_")}
    assert seen - of_slurm == {"PALS_RANKID"}
    assert bool(of_slurm) == (ranks.place == "slurm")  # a rank is a task of Slurm there


def test_horovod_settings_of_the_driver_follow_the_job_and_cores_are_shared(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1234")

    def main() -> list[str]:
        return [os.environ[name] for name in ("HOROVOD_FUSION_THRESHOLD", "OMP_NUM_THREADS")]

    cores = len(os.sched_getaffinity(0))
    assert ranks.run(2, main) == ["1234", str(max(1, cores // 2))]


@pytest.mark.places("spark")
def test_threads_of_all_executors_are_the_default_and_env_comes_first(ranks: Ranks) -> None:
    assert ranks.spark is not None
    setting = "spark.executorEnv.OMP_NUM_THREADS"
    ranks.spark.conf.set(setting, "5")
    try:
        assert ranks.run(1, environment, name="OMP_NUM_THREADS") == "5"
        options = {"env": {"OMP_NUM_THREADS": "7"}}
        assert ranks.run(1, environment, options, name="OMP_NUM_THREADS") == "7"
    finally:
        ranks.spark.conf.unset(setting)


@pytest.mark.places(*EVERYWHERE)
def test_no_secret_and_no_key_is_in_argv_or_environment(ranks: Ranks) -> None:
    def main() -> tuple[list[str], list[str], dict[str, str]]:
        own = psutil.Process()
        return own.cmdline(), own.parent().cmdline(), {**os.environ, **own.environ()}

    own, parent, variables = ranks.run(1, main)
    module = own.index("horovod_runner.worker.main")
    assert own[module - 1] == "-m"
    assert all(argument.replace(".", "", 1).isdigit() for argument in own[module + 1 :])
    assert not [name for name in variables if re.search("SECRET|CURVE|KEY", name)]
    assert not [argument for argument in parent if len(argument) == 40 and "." not in argument]


@pytest.mark.places(*EVERYWHERE)
def test_an_exception_arrives_as_its_own_type_with_the_remote_traceback(ranks: Ranks) -> None:
    def main() -> None:
        print("the last words")
        if os.environ["HOROVOD_RANK"] == "1":
            raise BadLabelError(7)
        threading.Event().wait()  # the failure ends the ranks that would run on

    with pytest.raises(BadLabelError, match="bad label 7") as caught:
        ranks.run(2, main)
    assert caught.value.label == 7
    cause = caught.value.__cause__
    assert isinstance(cause, RankFailedError)
    assert cause.rank == 1
    assert cause.exit_code == 1
    text = str(cause)
    assert f"rank 1 of 2 on {os.uname().nodename} (pid {cause.pid}" in text
    assert "raise BadLabelError(7)" in text
    assert text.count("Traceback") == 2  # our heading, and Python's own
    assert "the last words" in text
    assert "worker/main.py" not in text  # the user's frames alone
    assert "rank 1 of 2" in caught.value.__notes__[0]


@pytest.mark.places(*EVERYWHERE)
def test_a_killed_rank_is_named_with_its_signal_and_its_last_words_arrive(ranks: Ranks) -> None:
    def main() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            print("so long", flush=True)
            log_to_driver("the last line")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        pytest.raises(RankFailedError, match=r"rank 1 of 2.*SIGKILL.*memory") as caught,
    ):
        ranks.run(2, main)
    assert caught.value.exit_code == -signal.SIGKILL
    assert "so long" in str(caught.value)
    assert "the last line\n" in output.getvalue()


def test_sys_exit_with_a_code_is_a_failure_and_without_one_is_none(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"sys\.exit") as caught:
        ranks.run(1, lambda: sys.exit(3))
    assert caught.value.exit_code == 3
    assert ranks.run(1, lambda: sys.exit(0)) is None


def test_a_value_that_cannot_be_pickled_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"type _thread\.lock .*TypeError"):
        ranks.run(1, threading.Lock)


def test_what_cannot_be_sent_is_refused_before_anything_is_launched(ranks: Ranks) -> None:
    lock = threading.Lock()

    def main() -> None:
        lock.acquire()

    with pytest.raises(SerializationError, match=r"main -> lock .*_thread\.lock"):
        ranks.run(1, main)


@pytest.mark.places("spark", "connect")
def test_what_lives_on_the_driver_alone_is_named_with_the_way_to_it(ranks: Ranks) -> None:
    session = ranks.spark
    assert session is not None
    frame = session.range(3)

    def main(**kwargs: Any) -> Any:
        assert session is not None
        return session.version

    with pytest.raises(SerializationError, match=r"main -> session .*pyspark\.sql\..* before run"):
        ranks.run(1, main)
    told = r"frames\[0\] .*pyspark\.sql\..*run\(main, train=df\)"
    with pytest.raises(SerializationError, match=told):
        ranks.run(1, lambda frames: frames, frames=[frame])
    told = r"count -> self .*DataFrame .*run\(main, train=df\)"
    with pytest.raises(SerializationError, match=told):
        ranks.run(2, frame.count)


def test_processes_that_a_rank_started_end_with_it(ranks: Ranks) -> None:
    def main() -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    pid = ranks.run(1, main)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert wait_for_end([psutil.Process(pid)], 5) == []


def test_classes_of_a_script_keep_their_identity_there_and_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import pickle, sys
            from horovod_runner import HorovodRunner

            class Point:
                def __init__(self, x):
                    self.x = x

            class Trouble(Exception):
                pass

            def main(fail):
                import helper
                if fail:
                    raise Trouble("as expected")
                pickle.dumps(Point)  # by name: found in the rank's __main__
                return Point(helper.VALUE), sys.argv[1]

            if __name__ == "__main__":
                point, argument = HorovodRunner(np=-1).run(main, fail=False)
                assert isinstance(point, Point), type(point)
                assert argument == "--flag"
                try:
                    HorovodRunner(np=-1).run(main, fail=True)
                except Trouble as trouble:
                    print("caught", trouble, point.x)
            """
        )
    )
    (tmp_path / "helper.py").write_text("VALUE = 17\n")
    done = programs.run(sys.executable, script, "--flag")
    assert done.stdout == "caught as expected 17\n", done.stderr
    assert "Traceback" not in done.stderr


def test_the_working_directory_is_the_drivers_and_its_files_hide_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "pickle", "psutil", "horovod_runner"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not the library')\n")
    monkeypatch.chdir(tmp_path)
    assert HorovodRunner(np=-1).run(os.getcwd) == str(tmp_path)


def test_the_rank_table_is_on_the_drivers_log(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(2, lambda: None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["HorovodRunner:", "rank", "host", "pid", "GPU"]
    assert [line.split()[1] for line in lines[1:3]] == ["0", "1"]


def test_messages_from_forks_and_threads_do_not_mix(ranks: Ranks) -> None:
    texts = [letter * 2_000_000 for letter in "abcd"]  # longer than the pipe takes at once

    def main() -> None:
        import multiprocessing

        fork = multiprocessing.get_context("fork")

        def shout(text: str) -> None:
            for _ in range(3):
                log_to_driver(text)

        workers: list[Any] = [threading.Thread(target=shout, args=[text]) for text in texts[:2]]
        workers += [fork.Process(target=shout, args=[text]) for text in texts[2:]]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    lines = _run_and_collect(ranks, 1, main)
    assert sorted(lines) == sorted(texts * 3)


@pytest.mark.places(*EVERYWHERE)
def test_a_rank_that_cannot_be_started_is_told_at_once(ranks: Ranks) -> None:
    with pytest.raises(LaunchError, match=r"task \d of 2 on .*embedded null byte"):
        ranks.run(2, print, {"env": {"BROKEN": "a\0b"}})


def old_code() -> str:
    from sparkdl import HorovodRunner as OldRunner
    from sparkdl.horovod import log_to_driver

    log_to_driver("a line of older code")
    return OldRunner.__module__


def test_code_with_sparkdls_names_runs_once_asked_for(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_installed", {})  # another place's test may have asked
    with pytest.raises(ModuleNotFoundError, match="sparkdl"):
        ranks.run(1, old_code)
    before = set(sys.modules)
    horovod_runner.sparkdl.install()
    try:
        assert ranks.run(1, old_code) == "horovod_runner.run.runner"
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "sparkdl":
                del sys.modules[name]
    assert "a line of older code" in capsys.readouterr().out


@pytest.mark.spark
@pytest.mark.places("spark")
def test_ranks_do_not_inherit_what_an_earlier_task_of_spark_has_set(ranks: Ranks) -> None:
    """Spark uses its Python workers again; an import of a framework sets variables there."""

    def leave(batches: Any) -> Any:
        os.environ["LEFT_BY_A_TASK"] = "1"
        yield from batches

    def main() -> str | None:
        return os.environ.get("LEFT_BY_A_TASK")

    assert ranks.spark is not None
    rows = ranks.spark.range(0, 8, 1, 4)
    rows.mapInArrow(leave, "id long").collect()
    assert ranks.runner(4).run_all(main) == [None] * 4
