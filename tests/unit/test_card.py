"""What runners and runs say of themselves, in a line of text and in a notebook."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from horovod_runner import CheckpointConfig, HorovodRunner
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.text import without_password
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.results.card import value_text
from horovod_runner.results.page.document import page
from horovod_runner.results.run import Attempt, Run
from horovod_runner.sinks import Sink
from horovod_runner.wire.marker import Marker
from tests.made_up_runs import made_up_run, run_under_way


def test_a_runner_shows_the_options_that_differ_from_their_defaults() -> None:
    runner = HorovodRunner(
        np=(2, 8),
        checkpoint_dir="s3://me:my-password@bucket/runs",
        env={"API_TOKEN": "my-token"},
        sinks=[Sink()],
        checkpoint_config=CheckpointConfig(num_to_keep=5),
    )
    assert repr(runner) == (
        "HorovodRunner(np=(2, 8), env={'API_TOKEN': ***}, checkpoint_dir='s3://***@bucket/runs', "
        "sinks=[Sink(...)], checkpoint_config=CheckpointConfig(num_to_keep=5))"
    )
    html = runner._repr_html_()
    assert "2 to 8 ranks on Spark" in html
    assert "none yet" in html
    assert not re.search("my-password|my-token", html)


@pytest.mark.parametrize(
    ("np", "text"),
    [(-1, "1 rank, processes on this machine"), (4, "4 ranks on Spark"), (0, "all slots on Spark")],
)
@pytest.mark.filterwarnings("ignore:np=0")
def test_a_runner_says_in_words_where_its_ranks_are_to_be(np: int, text: str) -> None:
    assert text in HorovodRunner(np=np)._repr_html_()


def test_a_run_says_in_a_line_how_it_ended() -> None:
    run = made_up_run(8, 3)
    run.result_text = "{'accuracy': 0.9}"
    assert re.fullmatch(
        r"<Run 00000008 of train: finished in 8 s; 8 ranks on 2 hosts; on spark://master:7077; "
        r"result {'accuracy': 0.9}; loss=[\d.]+, accuracy=[\d.]+>",
        repr(run),
    )
    runner = HorovodRunner(np=8)
    runner._runs.last = run
    assert repr(runner) == "<HorovodRunner(np=8); last_run: finished in 8 s>"
    assert "{&#39;accuracy&#39;: 0.9}" in runner._repr_html_()


def test_a_failed_run_folds_its_errors_and_names_its_warnings() -> None:
    run = made_up_run(2, 3, status="failed")
    run.attempts[0].error, run.attempts[0].details = "KeyError: '<b>'", "KeyError: '<b>'\n | line"
    run.attempts.append(Attempt(2, 1.0, 2.0, error="OSError: no disk"))
    run.warnings += [f"checkpoint {number} is missing" for number in range(9)]
    assert "; OSError: no disk; 9 warnings>" in repr(run)
    html = run._repr_html_()
    assert "<summary>attempt 1: KeyError: &#39;&lt;b&gt;&#39;</summary>" in html
    assert "checkpoint 4 is missing\nand 4 more" in html
    assert "<b>'" not in html


def test_a_run_of_many_attempts_shows_the_last_ones() -> None:
    run = made_up_run(2, 3, status="failed")
    run.attempts[:] = [
        Attempt(number, 1.0, 2.0, error="E: " + "x" * 5000, details="d" * 60_000)
        for number in range(1, 41)
    ]
    assert len(repr(run)) < 500
    html = run._repr_html_()
    assert ">40; those before the last one:<" in html
    assert [f">attempt {number}<" in html for number in (34, 35, 39, 40)] == [0, 1, 1, 0]
    assert html.count("<summary>attempt ") == 5
    assert len(html) < 400_000


def test_a_run_whose_driver_was_killed_says_so() -> None:
    run = made_up_run(2, 3)
    run.status, run.timings.end, run.recorded = "running", None, run.timings.queued + 60
    assert "running when this was recorded, on 2025-06-1" in repr(run)
    html = run._repr_html_()
    assert "it had not ended" in html
    assert "on spark://master:7077, 1 min 0 s" in html  # not until now


def test_checkpoints_that_disappear_meanwhile_are_no_error() -> None:
    looks = iter([[checkpoint("/folder")], []])

    class Vanishing(Run):
        @property
        def checkpoints(self) -> list[Checkpoint]:
            return next(looks, [])

    assert "checkpoints: 1, the latest of step 7" in repr(Vanishing("1a2b", -2))


def test_a_run_of_many_ranks_has_a_short_text() -> None:
    run = made_up_run(64, 3)
    assert len(repr(run)) < 200
    html = run._repr_html_()
    hosts = ", ".join(f"worker-{number} (4 ranks)" for number in range(3))
    assert f">16: {hosts}, ..., worker-15 (4 ranks)<" in html
    assert html.count("<tr>") < 30  # of the 64 ranks, the slowest 20 are listed


def test_arguments_that_look_like_secrets_are_hidden() -> None:
    html = made_up_run(2, 3)._repr_html_()
    assert "lr=0.1, epochs=3, api_token=***, max_tokens=512" in html
    assert "hf_hidden" not in html


def test_a_run_that_knows_nothing_yet_can_be_shown() -> None:
    assert repr(Run("1a2b", -2)) == "<Run 1a2b of main: running; no ranks started>"
    assert "running" in Run("1a2b", -2)._repr_html_()
    assert "<Run " in repr(run_under_way(4))


class Large:
    shape = (3, 4)

    def __repr__(self) -> str:
        raise AssertionError("may take long")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (0.25, "0.25"),
        ({"loss": 0.5, "model": Large()}, "{'loss': 0.5, 'model': <Large of shape (3, 4)>}"),
        (["x" * 500] * 3, None),
        (object(), "<object>"),
        ({"loss": np.float32(0.5), "steps": np.int64(7)}, "{'loss': 0.5, 'steps': 7}"),
        (np.float64(0.25), "0.25"),
        (OrderedDict(loss=0.5), "{'loss': 0.5}"),
        ({3: 1, "b": 2, None: 3}, "{3: 1, 'b': 2, None: 3}"),
        (set(range(100_000)), "<set of 100,000 values>"),
        ({"api_token": "abc", "token_accuracy": 0.9}, "{'api_token': ***, 'token_accuracy': 0.9}"),
        ("s3://me:pw@host/x", "'s3://***@host/x'"),
    ],
)
def test_the_text_of_a_result_is_short_and_cheap(value: object, text: str | None) -> None:
    found = value_text(value)
    assert len(found) <= 200
    assert text is None or found == text


class Unsortable:
    def __lt__(self, other: object) -> bool:
        raise AssertionError("may take long")


def test_the_text_of_a_result_compares_no_keys() -> None:
    keys = [Unsortable() for _ in range(20)]
    text = value_text(dict.fromkeys(keys, 1))
    assert text.startswith("{<Unsortable>: 1, ")
    assert text.endswith("...}")


@pytest.mark.parametrize("length", [90, 300, 5000])
def test_a_password_in_a_long_text_is_hidden_before_the_text_is_cut(length: int) -> None:
    url = f"postgresql://me:{'my-password' * 6}@host/{'x' * length}"
    assert "my-pass" not in value_text(url)
    run = made_up_run(1, 1)
    run.params = {"address": url}
    assert "my-pass" not in run._repr_html_()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:pw@host/x", "s3://***@host/x"),
        ("s3://key:se/cr+et@bucket/x", "s3://***@bucket/x"),
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("https://token@host/x, http://host/y", "https://***@host/x, http://host/y"),
        ("https://a.net/c?sv=1&sig=abc%3D&se=2", "https://a.net/c?sv=1&sig=***&se=2"),
        ("https://h/x?X-Amz-Signature=abc", "https://h/x?X-Amz-Signature=***"),
        ("jdbc:postgresql://h/db?user=u&password=pw", "jdbc:postgresql://h/db?user=u&password=***"),
        ("sc://host:15002/;token=abc;user_id=me", "sc://host:15002/;token=***;user_id=me"),
        ("abfss://container@account.net/x", "abfss://container@account.net/x"),
        ("spark://one:7077,two:7077", "spark://one:7077,two:7077"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
    ],
)
def test_secrets_in_urls_are_hidden(text: str, shown: str) -> None:
    assert without_password(text) == shown


def checkpoint(folder: str) -> Checkpoint:
    found = Checkpoint(LocalFolder(Path("/folder")), Marker("c.bin", 1, 7, "bytes", 9, "", "1a2b"))
    found.path = f"{folder}/c.bin"
    return found


def test_the_password_of_a_checkpoint_folder_is_shown_nowhere() -> None:
    found = checkpoint("s3://me:my-password@bucket/runs")
    assert repr(found) == "Checkpoint(step=7, size=9, path='s3://***@bucket/runs/c.bin')"
    run = made_up_run(2, 3)
    run._checkpoints = [found]
    run.status = "failed"
    run.attempts[0].error = "OSError: s3://me:my-password@bucket/runs cannot be read"
    runner = HorovodRunner(np=2, checkpoint_dir="s3://me:my-password@bucket/runs")
    for text in (repr(run), run._repr_html_(), repr(runner), repr(runner.options)):
        assert "my-password" not in text
    run.attempts[0].details = f"{run.attempts[0].error}: Traceback"
    assert "my-password" not in page(run)
    assert "s3://***@bucket/runs/c.bin" in page(run)


def test_a_sink_of_any_kind_is_named() -> None:
    class Strange(Sink):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    runner = HorovodRunner(np=1, sinks=[Strange()])
    assert repr(runner) == "HorovodRunner(np=1, sinks=[Strange(...)])"


def test_a_runner_that_is_not_made_yet_has_a_text() -> None:
    assert "HorovodRunner object" in repr(HorovodRunner.__new__(HorovodRunner))
