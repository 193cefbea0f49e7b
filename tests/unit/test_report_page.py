"""The page about a run: what it shows, drawn from made-up records, and the command that writes it.

tests/real/test_report.py opens pages in a browser.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from html import escape, unescape
from pathlib import Path

import msgspec
import numpy as np
import pytest

from horovod_runner.common.text import is_secret
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results import registry, saved_run
from horovod_runner.results.metrics_table import Metrics
from horovod_runner.results.page import logs, numbers, ranks
from horovod_runner.results.page.document import page
from horovod_runner.results.page.over_time import Timeline
from horovod_runner.results.page.view import View
from horovod_runner.results.recorder import failed
from horovod_runner.results.registration import Registration
from horovod_runner.results.run import Line, Run, Timings
from horovod_runner.results.run_log import RunLog
from horovod_runner.tools.commands import cli
from horovod_runner.wire.events import AttemptBegan, Notice, Report
from horovod_runner.wire.measurements import UNKNOWN, Profile
from tests.made_up_runs import keep, made_up_run
from tests.web import PageReader

pytestmark = pytest.mark.usefixtures("own_records")
ALL = (
    *("verdict", "metrics", "ranks", "stragglers", "time", "hosts", "lines", "failures"),
    *("checkpoints", "logs", "software", "parameters"),
)


def test_numbers_have_their_units() -> None:
    given = (0.0, 0.00003, 0.0421, 3.456, 125, 3780, 90_000, 200_000)
    assert [numbers.duration(seconds) for seconds in given] == [
        *("0 ms", "0.03 ms", "42.1 ms", "3.46 s", "2 min 5 s", "1 h 3 min", "1 d 1 h", "2 d 8 h"),
    ]
    assert [numbers.size(count) for count in (12, 3_400, 5.6e9)] == ["12 B", "3.4 kB", "5.6 GB"]
    assert [numbers.percent(share) for share in (0, 0.034, 0.41)] == ["0%", "3.4%", "41%"]
    assert [numbers.number(value) for value in (math.nan, 0.12345, 12345.6, -1e9)] == [
        *("nan", "0.1235", "12,346", "-1e+09"),
    ]


def test_characters_that_html_forbids_are_replaced() -> None:
    run = made_up_run(1, 1, profile=False)
    run.main = "<a href=\"x\" title='y'>&\0\x1b\udcff"
    assert "<span>&lt;a href=&#34;x&#34; title=&#39;y&#39;&gt;&amp;\ufffd\ufffd\ufffd<" in page(run)


def test_measurements_are_divided_among_the_intervals_that_they_touch() -> None:
    timeline = Timeline(100.0, 2.0, 5)
    rows = [Profile(0, 103.0, 2.0, {"optimizer": 10}), Profile(0, 107.0, 4.0, {"optimizer": 40})]
    sums = timeline.sums(rows, lambda row: (row.steps["optimizer"],))
    assert sums[:4].tolist() == [[1.0, 5.0], [2.0, 15.0], [2.0, 20.0], [1.0, 10.0]]
    assert np.isnan(sums[4]).all()
    ahead = timeline.sums(rows, lambda row: (row.steps["optimizer"],), offset=2.0)
    assert ahead[0].tolist() == [2.0, 15.0]


def reporting(*reports: Report) -> Run:
    """A run of which only reports are known."""
    run = made_up_run(1, 1, profile=False, reporting=())
    RunLog(run).add(reports)
    return run


def drawn(run: Run) -> dict[str, list[list[tuple[float, float]]]]:
    """By the title of a chart, the vertices of each of its lines."""
    found = {}
    for figure in re.findall(r"<figure>.*?</figure>", page(run), re.DOTALL):
        title = re.findall(r"<figcaption>(.*?) <small>", figure)[0]
        paths = re.findall(r'class="line">\s*<path d="([^"]*)"', figure)
        pairs = [re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path) for path in paths]
        found[title] = [[(float(x), float(y)) for x, y in points] for points in pairs]
    return found


def test_a_line_is_interrupted_where_nothing_is_known() -> None:
    values = [1.0, 2.0, math.nan, 3.0]
    written = page(reporting(*(Report(0, {"x": x}, step) for step, x in enumerate(values))))
    (path,) = re.findall(r'class="line">\s*<path d="([^"]*)"', written)
    assert [(path.count("M"), path.count("L"))] == [(2, 1)]
    assert len(re.findall(r"<use xlink:href=[^>]*>", written)) == 1  # a dot for the point alone


def test_peaks_stay_and_values_that_are_no_numbers_are_counted() -> None:
    values = {500: 99.0, 700: math.nan, 701: math.inf}
    run = reporting(*(Report(0, {"x": values.get(step, 1.0)}, step) for step in range(5000)))
    assert "2 values are not finite numbers" in page(run)
    (line,) = drawn(run)["x"]
    assert len(line) < 250
    assert [y for _, y in line].count(min(y for _, y in line)) == 1


def test_what_was_reported_once_is_a_sentence_and_no_chart() -> None:
    run = reporting(Report(0, {"once": 3.25, "twice": 0}, 7))
    RunLog(run).add([Report(1, {"once": 3.25, "twice": 1}, 7)])
    RunLog(run).add([Report(0, {"twice": 1}, 8), Report(0, {"bad": math.nan}, 8)])
    assert list(drawn(run)) == ["twice"]
    assert "Less than two values to draw: once 3.25 (step 7); bad nan (step 8)." in page(run)


def test_a_metric_whose_only_value_was_thinned_away_is_left_out() -> None:
    run = made_up_run(1, 1, profile=False, reporting=())
    run._metrics = Metrics(max_rows=4)  # as of a run with very many reports
    for step in range(8):
        RunLog(run).add([Report(0, {"loss": 1.0} | ({"once": 3.0} if step == 1 else {}), step)])
    assert list(drawn(run)) == ["loss"]


@pytest.mark.parametrize("value", [1e299, -1e299, 5e-324, 1e17, 0.0, 1e-12])
def test_numbers_of_any_size_are_drawn(value: float) -> None:
    run = reporting(*(Report(0, {"x": value * step / 9}, step) for step in range(10)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (line,) = drawn(run)["x"]
    assert len(line) > 1
    assert all(0 <= number <= 245 for point in line for number in point)


def test_metrics_of_several_ranks_and_attempts_are_in_one_panel() -> None:
    run = made_up_run(3, 2, profile=False, reporting=range(3))
    recorder = RunLog(run)
    recorder.add([failed(ValueError("x"))])
    recorder.add([AttemptBegan(2)])
    run.attempts[1].resumed_from = 15
    recorder.add([Report(0, {"loss": 1.0}, 16), Report(0, {"loss": 2.0}, 17)])
    assert [len(lines) for lines in drawn(run).values()] == [3, 3]
    written = page(run)
    assert written.count("<title>attempt 2</title>") == 1  # of accuracy nothing came after it
    path = re.findall(r'class="line">\s*<path d="([^"]*)"', written)[0]
    assert path.count("M") == 2


def test_of_many_ranks_a_chart_shows_median_and_range() -> None:
    run = made_up_run(20, 3, profile=False, reporting=range(20))
    assert [len(lines) for lines in drawn(run).values()] == [1, 1]
    written = page(run)
    assert written.count("median of 20 ranks") == 2
    assert written.count(">lowest to highest<") == 2


def test_what_a_host_measured_once_is_in_its_table() -> None:
    run = made_up_run(2, 5, reporting=())
    assert "Busy cores" not in drawn(run)
    heads = re.findall(r'<th scope="col">([^<]*)</th>', page(run).partition('id="hosts"')[2])
    assert heads[4:] == ["busy cores", "memory of the ranks", "free memory", "disk", "network"]


def test_the_look_of_charts_is_that_of_the_page_and_stays_where_it_is() -> None:
    import matplotlib as mpl

    run = made_up_run(2, 20, slow_rank=1)
    expected = re.sub("<footer>.*", "", page(run))
    with mpl.rc_context({"axes.facecolor": "red", "text.color": "red", "font.size": 40}):
        assert re.sub("<footer>.*", "", page(run)) == expected
        assert mpl.rcParams["font.size"] == 40


def test_without_matplotlib_the_page_has_all_but_charts_and_says_so(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["matplotlib"] = None
from horovod_runner.tools.commands import cli
from tests.made_up_runs import keep, made_up_run
keep(made_up_run(4, 20, slow_rank=1))
sys.exit(cli.main(["report", "-o", sys.argv[1]]))
"""
    path = tmp_path / "run.html"
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'horovod_runner[plot]'" in done.stderr
    assert PageReader(path.read_text()).sections == [
        *("verdict", "ranks", "hosts", "lines", "logs", "software", "parameters"),
    ]
    assert "pip install &#39;horovod_runner[plot]&#39;" in path.read_text()


def test_the_row_of_a_group_shows_the_rank_that_waits_least() -> None:
    written = page(made_up_run(200, 12, slow_rank=77))
    assert "A row stands for 4 ranks" in written
    told = [json.loads(unescape(each)) for each in re.findall("data-told='(.*?)'", written)]
    (heat,) = [each for each in told if "cells" in each]
    dark = [name for name, row in zip(heat["names"], heat["cells"], strict=True) if 1 in row]
    assert dark == ["ranks 76-79"]


def test_time_blocked_in_collectives_is_divided_by_how_long_the_rank_waited() -> None:
    run = Run("test", 2)
    run.profile.begin(["host", "host"])
    for second in range(30):
        for rank, begun in ((0, 80_000), (1, 40_000)):  # microseconds before the end of a step
            arrivals = [(second * 10 + i, UNKNOWN, begun + 100_000 * (9 - i)) for i in range(10)]
            blocked = {"blocked": begun * 10 / 1e6}
            row = Profile(rank, 100.0 + second, 1.0, {"optimizer": 10}, blocked, arrivals=arrivals)
            run.profile.add(row, 100.0 + second)
    shown = View(run, run.status, "", 0.0)
    assert shown.spent(0, {"blocked": 0.8}) == pytest.approx(
        {"data": 0, "waiting": 0.4, "moving": 0.4, "report": 0, "checkpoint": 0}
    )
    assert shown.spent(1, {"blocked": 0.4})["waiting"] == pytest.approx(0)


def test_of_many_ranks_those_that_wait_least_and_most_have_a_bar() -> None:
    section = page(made_up_run(200, 12, slow_rank=77)).partition('id="ranks"')[2]
    bars, _, table = section.partition("</section>")[0].partition("<table>")
    assert bars.count('class="bar ') == 16 + 8 + 1
    assert "rank 77 · worker-19" in bars
    assert table.count("<tr>") == 201


def test_pieces_of_output_are_put_together() -> None:
    def piece(said: str, rank: int = 0, stream: str = "stdout") -> Line:
        return Line(1.0, rank, stream, said)  # type: ignore[arg-type]

    pieces = [
        piece("a"),
        piece("other\n", rank=1),
        piece("b\nc\n"),
        piece("10%\r20%\r"),
        piece("30%\n"),
        piece("\x1b[31mred\x1b[0m\n", stream="stderr"),
        piece("two\nlines", rank=-1, stream="notice"),
        piece("no end"),
    ]
    assert [(line.rank, line.text) for line in logs.whole_lines(pieces)] == [
        *((0, "ab"), (1, "other"), (0, "c"), (0, "30%"), (0, "red"), (-1, "two")),
        *((-1, "lines"), (0, "no end")),
    ]


def test_the_logs_of_a_page_have_a_limit() -> None:
    lines = [
        logs.LogLine(float(number), number % 3, "stdout", "<" * 400) for number in range(10_000)
    ]
    kept = logs.last_lines(lines)
    assert {line.rank for line in kept} == {0, 1, 2}
    assert kept[-1] is lines[-1]
    assert [line.time for line in kept] == sorted(line.time for line in kept)
    assert 200_000 < sum(len(escape(line.text)) for line in kept) < 1_000_000


def test_parameters_that_look_secret_are_hidden() -> None:
    secret = "password db_passwd API_TOKEN aws_secret_access_key hfToken apikey auth"
    assert all(is_secret(name, "x") for name in secret.split())
    shown = {"tokenizer": "bert", "max_tokens": 512, "use_auth": True, "author": "x", "lr": 0.1}
    shown |= {"password": None}
    assert [name for name, value in shown.items() if is_secret(name, value)] == []
    written = page(made_up_run(1, 1))
    assert "hf_hidden" not in written
    assert "<dt>max_tokens</dt><dd>512</dd>" in written


def test_a_stack_begins_where_main_does() -> None:
    stack = [
        *("<frozen runpy>:88 run", "/x/horovod_runner/worker/main.py:165 _call_main"),
        *("/work/train.py:3 train", "<frozen importlib>:1 load", "/x/torch/__init__.py:1 f"),
    ]
    assert ranks.own_calls(stack) == ["/work/train.py:3 train", "/x/torch/__init__.py:1 f"]
    assert ranks.own_calls(stack[:2]) == stack[1:2]


def test_a_page_has_all_that_is_known_and_nothing_else() -> None:
    written = page(made_up_run(4, 20, slow_rank=1))
    assert "Rank 1 is last in" in written
    full = PageReader(written)
    assert full.sections == [name for name in ALL if name not in {"failures", "checkpoints"}]
    bare = PageReader(page(Run("0" * 8, -1, timings=Timings(0.0, end=1.0), status="cancelled")))
    assert bare.sections == []
    no_profile = PageReader(page(made_up_run(4, 20, profile=False)))
    assert no_profile.sections == ["metrics", "hosts", "logs", "software", "parameters"]
    assert all(re.match(r"#|data:,$", each) for each in full.links)


def test_a_failed_run_shows_each_error_in_full() -> None:
    run = made_up_run(2, 5, status="failed")
    recorder = RunLog(run)
    for number in (1, 2):
        if number == 2:
            recorder.add([AttemptBegan(2)])
            run.attempts[1].resumed_from = 30
        recorder.add([failed(ValueError(f"bad <row> {number}\nsecond line"))])
    run.ranks = [run.ranks[0], run.ranks[1]._replace(exit_code=-9)]
    written = page(run)
    PageReader(written)
    for number in (1, 2):
        assert f"ValueError: bad &lt;row&gt; {number}\nsecond line</pre>" in written
    assert "from the checkpoint of step 30" in written
    assert "rank 1: exit code -9" in written
    assert '<p class="error">ValueError: bad &lt;row&gt; 2</p>' in written


def test_the_page_of_a_thousand_ranks_is_small() -> None:
    written = page(made_up_run(1000, 12, slow_rank=617, reporting=range(0, 1000, 50)))
    PageReader(written)
    assert len(written.encode()) < 600_000
    assert "rank 617 · worker-154 (the verdict names it)" in written


def test_an_empty_id_means_no_run() -> None:
    keep(Run("1234abcd", 1))
    with pytest.raises(HorovodRunnerError, match=r"no run with an empty id .* latest: 1234abcd"):
        saved_run.load_run("")


def test_a_record_without_a_driver_is_lost() -> None:
    run = Run("1234abcd", 1, warnings=["1 checkpoint is missing"])
    keep(run)
    loaded = saved_run.load_run("1234")
    assert "1 checkpoint is missing" in page(loaded)
    assert registry.status_now(run) == "running"  # of this process
    assert registry.status_now(loaded) == "lost"
    assert "no driver of it runs on this machine any more" in page(loaded)
    here, me = socket.gethostname(), os.getpid()
    registry.folder().mkdir()
    for host, pid, born, status in (
        (here, me, registry.born(me), "running"),
        (here, me, "before", "lost"),  # the id of a process that has ended
        ("elsewhere", 1, "", "running"),
    ):
        entry = registry.Entry(run.run_id, "train", 1, "local", host, pid, born, 1)
        path = registry.folder() / f"{run.run_id}.json"
        path.write_bytes(msgspec.json.encode(entry))
        assert registry.status_now(loaded) == status
    run.status = "failed"
    keep(run)
    assert registry.status_now(saved_run.load_run("1234")) == "failed"


def test_records_and_pages_are_found_by_the_urls_of_files(tmp_path: Path) -> None:
    record, written = tmp_path / "copy.run", tmp_path / "run.html"
    keep(Run("1234abcd", 1)).rename(record)
    url = written.as_uri()
    assert saved_run.load_run(record.as_uri()).report(url) == written
    written.rename(tmp_path / "first.html")
    assert cli.main(["report", record.as_uri(), "-o", url]) == 0
    assert written.read_text().startswith("<!doctype html>")


def test_the_record_that_is_written_last_is_the_latest_though_the_clock_was_set_back() -> None:
    first, second = (Run(f"{number}234abcd", 1) for number in (1, 2))
    keep(first)
    (path,) = saved_run.kept()
    later = path.stat().st_mtime + 3600
    os.utime(path, (later, later))
    keep(second)
    assert saved_run.load_run().run_id == second.run_id
    keep(first)
    assert saved_run.load_run().run_id == first.run_id
    keep(second, most_runs=1)
    assert [path.stem for path in saved_run.kept()] == [second.run_id]


def test_a_driver_writes_its_log_when_it_is_asked() -> None:
    run = Run("1234abcd", 1)
    log = RunLog(run, saved_run.new_path(run.run_id))
    with Registration(run, lambda: None, log.flush):
        assert registry.running("12") == [run.run_id]
        assert saved_run.kept() == []  # nobody has asked
        assert registry.write_log(run.run_id)
        log.add([Notice("later")])
        assert registry.write_log(run.run_id)
        assert [line.text for line in saved_run.load_run("1234").logs] == ["later"]
    assert registry.running() == []
    assert registry.write_log(run.run_id)  # it has ended, and left a log


def test_a_log_that_cannot_be_written_keeps_no_run_from_being_stopped() -> None:
    asked, stopped = threading.Event(), threading.Event()

    def write() -> None:
        asked.set()
        raise ValueError("cannot be written")

    run = Run("1234abcd", 1)
    with Registration(run, stopped.set, write):
        assert registry.ask_to_write(run.run_id)
        assert asked.wait(30)
        registry._tell_driver(run.run_id, b"x")
        assert stopped.wait(30)


def test_the_command_writes_and_lists_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["report", "--list"]) == 0
    assert cli.main(["report"]) == 1
    said = capsys.readouterr()
    assert said.out == "no runs\n"
    assert "there is no run in" in said.err
    keep(made_up_run(2, 2))
    keep(made_up_run(3, 2, status="failed"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "--list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "main", "np", "where", "status", "began", "duration"]
    assert first.split()[:5] == ["00000003", "train", "3", "spark://master:7077", "failed"]
    assert (second.split()[0], second.split()[-1]) == ("00000002", "0:00:07")
    assert cli.main(["report", "00000002"]) == 0
    assert capsys.readouterr().out == "00000002.html\n"
    assert "<title>train 00000002: finished</title>" in Path("00000002.html").read_text()
    assert Path("00000002.html").stat().st_mode & 0o077 == 0
    assert cli.main(["report", "-o", "latest.html"]) == 0
    assert "<title>train 00000003: failed</title>" in Path("latest.html").read_text()
    assert cli.main(["report", "0000"]) == 1
    assert "write more of the id" in capsys.readouterr().err
    assert cli.main(["report", "-o", "missing/run.html"]) == 1
    assert "-o FILE" in capsys.readouterr().err


def test_the_list_shows_how_long_a_run_took(capsys: pytest.CaptureFixture[str]) -> None:
    for number, seconds in ((4, 3725.4), (5, 60.0), (6, 36_000.6), (7, -1.0)):
        run = made_up_run(number, 1)
        run.timings.end = run.timings.queued + seconds
        keep(run)
    assert cli.main(["report", "--list"]) == 0
    shown = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown == {
        "00000004": "1:02:05",
        "00000005": "0:01:00",
        "00000006": "10:00:01",
        "00000007": "0:00:00",  # by a clock that was set back
    }
