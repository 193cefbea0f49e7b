"""The page about a run, opened in a browser: of a real run, and of one whose texts are hostile."""

from __future__ import annotations

import html
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import report, save_checkpoint
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.slots import RankInfo
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.results.page.document import page
from horovod_runner.results.recorder import failed
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.wire.events import AttemptBegan, Notice, Output, Report
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.measurements import Lines
from tests.browser import Browser, browser
from tests.conftest import Ranks
from tests.made_up_runs import made_up_run
from tests.preload import TORCH

__all__ = ["browser"]

pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("report")]

DESKTOP, PHONE = 1280, 390
LARGEST = 2_000_000  # bytes of a page
SECTIONS = [
    *("verdict", "metrics", "ranks", "stragglers", "time", "hosts", "lines"),
    *("checkpoints", "logs", "software", "parameters"),
]
# What is wrong with a page as it is drawn. Boxes that scroll may hide what is in them.
LAYOUT = """(() => {
  const root = document.documentElement, wide = [], cut = [], overlapping = [], single = [];
  const scrolls = ".scroll, pre, .log", slack = 1;
  const HIDDEN = "title, select, pre, .log, details:not([open]) > :not(summary)";
  for (const each of document.querySelectorAll("main *")) {
    const right = each.getBoundingClientRect().right;
    if (right > innerWidth + 0.5 && !each.closest(scrolls))
      wide.push([each.tagName, each.getAttribute("class"), right]);
  }
  const inside = (a, b) => a.left >= b.left - slack && a.right <= b.right + slack
    && a.top >= b.top - slack && a.bottom <= b.bottom + slack;
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > slack;
  const main = document.querySelector("main"), texts = [];
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement, range = document.createRange();
    if (!node.data.trim() || parent.closest(HIDDEN)) continue;
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter(rect => rect.width && rect.height);
    if (!rects.length) continue;
    const box = parent.closest("svg") || parent.closest(".bar span, .status, td, li, figcaption");
    const call = parent.parentElement.querySelector(":scope > rect");  // of a flame graph
    for (const rect of rects) {
      if (box && !inside(rect, box.getBoundingClientRect())) cut.push(node.data);
      if (call && rect.right > call.getBoundingClientRect().right + slack) cut.push(node.data);
      if (parent.closest(".scroll")) continue;
      for (const [other, text] of texts)
        if (other.top < rect.bottom && over(rect, other)) overlapping.push([text, node.data]);
    }
    if (!parent.closest(".scroll")) texts.push(...rects.map(rect => [rect, node.data]));
  }
  for (const picture of document.querySelectorAll("[data-told]")) {
    const told = JSON.parse(picture.dataset.told);
    const ways = [...picture.querySelectorAll(".line > path")].map(path => path.getAttribute("d"));
    const places = ways.map(way => new Set(way.match(/[ML]-?[\\d.]+/g).map(x => x.slice(1))).size);
    const most = told.cells ? told.cells[0].length : Math.max(...places);
    if (!(most > 1)) single.push(picture.getAttribute("aria-label"));
  }
  const fetched = performance.getEntriesByType("resource").map(each => each.name);
  return {inner: innerWidth, scroll: root.scrollWidth, wide, cut, overlapping, single,
    fetched: fetched.filter(name => !name.startsWith("data:")),
    sections: [...document.querySelectorAll("section")].map(each => each.id)};
})()"""
# Moves the pointer over the middle of each chart and bar, and reads what is told.
TOLD = """[
  ...document.querySelectorAll("[data-told], .bar [data-tip], .flame [data-tip]")
].map(each => {
  const box = (each.querySelector("image, .line") || each).getBoundingClientRect();
  each.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
    clientX: (box.left + box.right) / 2, clientY: (box.top + box.bottom) / 2}));
  const tip = document.getElementById("tip");
  return tip.hidden ? "" : tip.textContent;
})"""
# Types into the filter of the logs, and counts the lines that are shown.
FILTER = """(() => {
  const form = document.getElementById("filter"), counts = [];
  const shown = () => [...document.querySelectorAll("#log > div")]
    .filter(each => each.getClientRects().length).length;
  for (const [rank, text] of [["", ""], ["1", ""], ["1", "STEP 4"], ["", "no such words"]]) {
    form.elements.rank.value = rank;
    form.elements.text.value = text;
    form.dispatchEvent(new Event("input"));
    counts.push(shown());
  }
  const bar = document.querySelector("[data-tip]").getBoundingClientRect();
  document.querySelector("[data-tip]").dispatchEvent(new PointerEvent("pointermove",
    {bubbles: true, clientX: bar.x + 2, clientY: bar.y + 2}));
  const tip = document.getElementById("tip");
  return {hidden: form.hidden, counts, tip: tip.hidden ? "" : tip.textContent};
})()"""


def well(width: int, sections: list[str]) -> dict[str, Any]:
    """What LAYOUT finds on a page with nothing wrong."""
    nothing: list[Any] = []
    wrong = dict.fromkeys(("wide", "cut", "overlapping", "single", "fetched"), nothing)
    return {"inner": width, "scroll": width, "sections": sections, **wrong}


HOSTILE = (
    "</span></pre></script></style></title><script>document.title='run'</script>"
    "<img src=x onerror=\"document.title='run'\">\"'><svg onload=document.title='run'>"
)


def train(steps: int, api_key: str) -> None:
    import time

    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        time.sleep(0.1 if hvd.rank() == 1 else 0.01)
        optimizer.step()
        report(loss=loss.item(), step=step)
        if step % 20 == 0:
            print(f"rank {hvd.rank()} is at step {step} <script>document.title='run'</script>")
    save_checkpoint(model.state_dict(), steps, metrics={"loss": loss.item()})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run, in which rank 1 is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        runner = Ranks("local", warm=TORCH).runner(2)
        runner.run(train, steps=60, api_key="not to be shown")
        assert runner.last_run is not None
        yield runner.last_run


# Slow: a browser is started, and a run is trained for it.
def test_the_page_of_a_real_run_is_whole_and_quiet(
    trained: Run, browser: Browser, tmp_path: Path
) -> None:
    path = trained.report(tmp_path / "run.html")
    written = path.read_text()
    assert "not to be shown" not in written
    assert "http" not in "".join(re.findall(r'(?:src|href|action)="([^"]*)"', written))
    assert not re.search(r"url\((?!#)|@import", written)
    dom, said = browser.open(path.as_uri())
    assert said == []
    assert f"<title>train {trained.run_id}: finished</title>" in dom
    # Other processes may take the cores, so the verdict is compared with the run's own diagnosis.
    found = trained.diagnose()
    verdict = [each.advice for each in found.findings] or [str(found).splitlines()[-1]]
    shown = html.unescape(dom)
    assert all(line in shown for line in verdict)
    assert "is at step 40 &lt;script&gt;" in dom
    for width in (DESKTOP, PHONE):
        assert browser.ask(written, LAYOUT, width) == well(width, SECTIONS)


def test_logs_are_filtered_and_bars_tell_their_numbers(trained: Run, browser: Browser) -> None:
    found = browser.ask(page(trained), FILTER)
    lines = len([line for line in trained.logs if "is at step" in line.text])
    assert lines == 6
    assert not found["hidden"]
    assert found["counts"][0] > lines
    assert found["counts"][1:] == [3, 1, 0]
    assert found["tip"].startswith("compute: ")


def hostile_run() -> Run:
    """A failed run that shows a hostile text wherever the user's texts are shown."""
    run = made_up_run(2, 30, slow_rank=1, status="failed")
    run.main = run.where = HOSTILE
    run.params = {HOSTILE: HOSTILE, "x": HOSTILE}
    run.software = {HOSTILE: HOSTILE}
    run.ranks = [RankInfo(rank, f"{rank}{HOSTILE}", 1, (HOSTILE,), 1) for rank in range(2)]
    recorder = RunLog(run)
    recorder.add([failed(ValueError(f"{HOSTILE}\n{HOSTILE}"))])
    recorder.add([Report(rank, {HOSTILE: 1.0}, step) for rank in (0,) for step in range(5)])
    for rank in range(2):
        recorder.add(
            [Output(rank, "stderr", f"{HOSTILE}\n{'x' * 3000}\n\x1b[1m\x00\x07{HOSTILE}\n")]
        )
        calls = [f"/{HOSTILE}.py\0{HOSTILE}\x001", f"/work/{'y' * 300}.py\0train\x002"]
        recorder.add([Lines(rank, 10, calls, [[0], [0, 1]], [5, 5])])
    recorder.add([Notice(HOSTILE)])
    marker = Marker(HOSTILE, 1, 3, "torch", 10, "", "", metrics={HOSTILE: 1.0})
    run._checkpoints.append(Checkpoint(LocalFolder(Path("/work")), marker))
    return run


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_texts_of_users_run_nothing_and_fit_the_page(width: int, browser: Browser) -> None:
    written = page(hostile_run())
    sections = [*SECTIONS[:7], "failures", *SECTIONS[7:]]
    assert browser.ask(written, LAYOUT, width) == well(width, sections)
    count = "[document.title, document.scripts.length, document.images.length]"
    title, scripts, images = browser.ask(written, count, width)
    assert title.endswith(": failed")
    assert "<script>" in title  # as a text
    assert (scripts, images) == (1, 0)  # the page's own


def odd_run() -> Run:
    """Long names, numbers of all sizes, values that are no numbers, single points, many metrics."""
    run = made_up_run(3, 30, slow_rank=1)
    host = "ip-10-0-0-{}.eu-central-1.compute.internal-of-a-department-with-a-long-name"
    run.ranks = [RankInfo(rank, host.format(rank), 1, (), 0) for rank in range(3)]
    recorder = RunLog(run)
    recorder.add([failed(ValueError("x"))])
    recorder.add([AttemptBegan(2)])
    run.attempts[1].started, run.attempts[1].resumed_from = run.attempts[0].started + 15, 5_000_000
    values: dict[str, Callable[[int], float]] = {
        "huge": lambda step: 1e299 * (-1) ** step,
        "too huge": lambda step: 1e308 * (-1) ** step,
        "large": lambda step: 1.2345e17 + step,
        "tiny": lambda step: 5e-324 * step,
        "small": lambda step: 1e-9 * step,
        "offset": lambda step: 1000 + step * 1e-6,
        "constant": lambda _: 5.0,
        "nan": lambda _: math.nan,
        "every other": lambda step: step if step % 2 else math.nan,
        "infinite": lambda step: math.inf if step == 5 else step,
        "negative": lambda step: -12345.678 * step,
        "a metric/with a long name/which goes on/until_it_does_not_fit_anywhere": float,
    }
    for step in range(40):
        numbers = {name: value(step) for name, value in values.items()}
        recorder.add([Report(0, numbers, step * 1_000_000)])
    recorder.add([Report(0, {"once": 3.25, "$x^2$ <b>": 1.0}, 77)])
    for step in range(3):
        recorder.add([Report(0, {f"m{n}": float(step) for n in range(40)}, step)])
    return run


def short_run() -> Run:
    """A run whose machine was measured once, and which has reported once."""
    run = made_up_run(2, 5, reporting=())
    RunLog(run).add([Report(0, {"loss": 1.0}, 1)])
    return run


MADE_UP: dict[str, Callable[[], Run]] = {
    "odd": odd_run,
    "short": short_run,
    "of a thousand ranks": lambda: made_up_run(
        1000, 12, slow_rank=617, reporting=range(0, 1000, 50)
    ),
    "without reports": lambda: made_up_run(4, 0, reporting=()),
    "never started": lambda: Run("0" * 8, -1, status="cancelled"),
}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("kind", MADE_UP)
def test_no_text_is_cut_and_no_chart_has_a_single_point(
    kind: str, width: int, browser: Browser
) -> None:
    written = page(MADE_UP[kind]())
    assert len(written.encode()) < LARGEST
    found = browser.ask(written, LAYOUT, width)
    assert found == well(width, found["sections"])


def test_the_page_of_much_of_everything_is_below_two_megabytes() -> None:
    run = made_up_run(2000, 5, slow_rank=617, status="failed", reporting=())
    recorder = RunLog(run)
    dice = random.Random(1)
    for step in range(1000):
        names = [f"metric {n}" for n in range(30)]
        recorder.add(
            [Report(rank, {name: dice.random() for name in names}, step) for rank in range(6)]
        )
    for number in range(20):
        recorder.add([failed(ValueError("x" * 60_000))])
        recorder.add([AttemptBegan(number + 2)])
    recorder.add([failed(ValueError("x" * 60_000))])
    for rank in range(2000):
        recorder.add([Output(rank, "stdout", "a line with <markup> & more\n" * 50)])
    calls = [f"/work/{n}/train.py\0function_{n}\x00{n}" for n in range(500)]
    for rank in range(2000):
        stacks = [[n, *range(0, 40)] for n in range(500)]
        recorder.add([Lines(rank, 500, calls, stacks, [1] * 500)])
    assert len(page(run).encode()) < LARGEST


def test_the_pointer_is_told_the_values_of_charts_and_bars(browser: Browser) -> None:
    run = made_up_run(2, 40, slow_rank=1)
    RunLog(run).add([Report(0, {"twice": 2.0 * step}, step) for step in range(0, 101, 2)])
    for rank, value in ((0, 7.0), (1, math.nan)):
        RunLog(run).add([Report(rank, {"diverged": value}, step) for step in range(0, 101, 2)])
    told = browser.ask(page(run), TOLD)
    assert "step 50\n100" in told
    assert "step 50\nrank 0 7" in told
    assert "" not in told
    assert any(text.startswith("compute: 70") for text in told)
    assert any("% of its time waiting for other ranks" in text for text in told)
    assert any(text.startswith("/work/train.py:12 train: 100.0%") for text in told)


def test_the_browser_reports_errors_and_what_a_page_may_not_do(
    browser: Browser, tmp_path: Path
) -> None:
    broken = page(made_up_run(1, 1)).replace("</body>", "<script>missing()</script></body>")
    (tmp_path / "broken.html").write_text(broken)
    _, said = browser.open((tmp_path / "broken.html").as_uri())
    assert "Content Security Policy" in "".join(said)
