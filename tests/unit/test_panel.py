"""The panel of a notebook: its HTML and text, and what it does where it cannot be drawn."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from horovod_runner.results import panel_html
from horovod_runner.results.live import live
from horovod_runner.results.panel import Panel, progress_sink
from horovod_runner.results.run import Run
from horovod_runner.sinks.progress import Progress
from horovod_runner.wire.events import Report
from tests.made_up_runs import run_under_way
from tests.stand_ins import KERNEL, SHELL
from tests.web import PageReader


def test_a_panel_says_all_without_its_styles() -> None:
    page = PageReader(panel_html.page(live(run_under_way(4, slow=3))))
    assert "train running 4 ranks on spark://master:7077, 30 s" in page.text
    assert "epoch 2, step 341 of 1,200 (28%), 10 steps/s, 1 min 26 s left" in page.text
    assert "compute 44%" in page.text
    assert "wait for the slowest rank 30%" in page.text
    assert "Rank 3 is last in 100% of the collectives" in page.text
    assert "[1] line 29" in page.text
    assert page.rows[0][:4] == ["rank", "host", "process", "steps/s"]
    assert page.rows[4] == [
        *("3", "host-0", "4003", "10", "", "74%", "20%", "0%", "1.5", "2.0 GB", "13.2/16")
    ]


def test_a_panel_of_a_thousand_ranks_is_small() -> None:
    html = panel_html.page(live(run_under_way(1000, seconds=3, slow=777)))
    rows = PageReader(html).rows
    assert [rows[1][0], rows[-1][:2]] == ["777", ["980", "others"]]
    assert len(rows) == 1 + 20 + 1
    assert len(html) < 60_000


def test_what_a_run_prints_is_text_in_the_panel() -> None:
    now = live(run_under_way(2))
    now.lines, now.main, now.error = ["<script>alert(1)</script>"], "<b>", "ValueError: a < b"
    now.verdict, now.metrics, now.ranks[0].host = "<i>", {"<u>": 1.0}, "<host>"
    html = panel_html.page(now)
    assert not re.search("<(script|i|u|host)>", html)
    text = PageReader(html).text
    assert "<script>alert(1)</script>" in text
    assert "<u> 1" in text
    assert panel_html.text(now).splitlines()[:2] == [
        "<b>: running, 2 ranks on spark://master:7077, 30 s",
        "ValueError: a < b",
    ]


def test_a_rank_without_a_summary_for_long_is_marked() -> None:
    now = live(run_under_way(2))
    now.ranks[1].silent = 64.0
    assert [row[4] for row in PageReader(panel_html.ranks(now)).rows[1:]] == [
        "",
        "no step for 1 min 4 s",
    ]


def test_a_run_that_knows_nothing_can_be_drawn() -> None:
    now = live(Run("1a2b", -2, main="train"))
    assert PageReader(panel_html.page(now)).text == "train running 0 ranks on , 0 s"


@pytest.mark.parametrize(
    ("in_notebook", "widgets", "kind"),
    [(True, object(), Panel), (True, None, Progress), (False, object(), Progress)],
)
def test_the_panel_is_for_notebooks_with_widgets(
    monkeypatch: pytest.MonkeyPatch, in_notebook: bool, widgets: object, kind: type[Progress]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", KERNEL if in_notebook else SHELL)
    found = None if widgets is None else SimpleNamespace(__spec__=widgets)
    monkeypatch.setitem(sys.modules, "ipywidgets", found)
    assert type(progress_sink()) is kind


def test_lines_take_over_where_the_panel_cannot_be_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    run = run_under_way(1)
    sink = Panel(first_seconds=0.0, line_seconds=0.0)
    sink.begin(run)
    sink.reports([Report(0, {"loss": 2.0}, step=1)])
    assert capsys.readouterr().err == ""  # a frontend is known, which shows the panel
    sink.idle()
    sink.reports([Report(0, {"loss": 1.0}, step=2)])
    sink.idle()
    sink.end(run)
    assert capsys.readouterr().err.startswith("HorovodRunner: step 2")


def test_a_run_without_reports_and_steps_shows_no_panel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = Panel(first_seconds=0.0)
    sink.begin(run_under_way(1))
    sink.idle()
    sink.end(run_under_way(1))
    assert capsys.readouterr() == ("", "")
