"""What runners and runs say of themselves, in a line of text and in a notebook."""

from __future__ import annotations

import re

import pytest

from horovod_runner import CheckpointConfig, HorovodRunner
from horovod_runner.results.card import value_text
from horovod_runner.results.run import Attempt, Run
from horovod_runner.sinks import Sink
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
    runner.last_run = run
    assert repr(runner) == "<HorovodRunner(np=8); last_run: finished in 8 s>"
    assert "{&#x27;accuracy&#x27;: 0.9}" in runner._repr_html_()


def test_a_failed_run_folds_its_errors_and_names_its_warnings() -> None:
    run = made_up_run(2, 3, status="failed")
    run.attempts[0].error, run.attempts[0].details = "KeyError: '<b>'", "KeyError: '<b>'\n | line"
    run.attempts.append(Attempt(2, 1.0, 2.0, error="OSError: no disk"))
    run.warnings += [f"checkpoint {number} is missing" for number in range(9)]
    assert "; OSError: no disk; 9 warnings>" in repr(run)
    html = run._repr_html_()
    assert "<summary>attempt 1: KeyError: &#x27;&lt;b&gt;&#x27;</summary>" in html
    assert "checkpoint 4 is missing\nand 4 more" in html
    assert "<b>'" not in html


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
    ],
)
def test_the_text_of_a_result_is_short_and_cheap(value: object, text: str | None) -> None:
    found = value_text(value)
    assert len(found) <= 200
    assert text is None or found == text
