"""The page about a run, opened in a browser: of a real run, and of one whose texts are hostile."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_runner import load_run, report, save_checkpoint
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.folders.local import LocalFolder
from horovod_runner.results.page.document import page
from horovod_runner.results.recorder import failed
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunLog
from horovod_runner.wire.events import Notice, Output, Report
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.measurements import Lines
from horovod_runner.wire.slots import RankInfo
from tests.browser import Browser, browser
from tests.conftest import Ranks
from tests.made_up_runs import made_up_run
from tests.preload import TORCH

__all__ = ["browser"]

pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("report")]

DESKTOP, PHONE = 1280, 390
SECTIONS = [
    *("verdict", "metrics", "ranks", "stragglers", "time", "hosts", "lines"),
    *("checkpoints", "logs", "software", "parameters"),
]
# What overflows the page to the right, but not in a box of its own that scrolls.
LAYOUT = """(() => {
  const root = document.documentElement, wide = [];
  for (const each of document.querySelectorAll("main *")) {
    const right = each.getBoundingClientRect().right;
    if (right > innerWidth + 0.5 && !each.closest(".scroll, pre, .log"))
      wide.push([each.tagName, each.getAttribute("class"), right]);
  }
  return {inner: innerWidth, scroll: root.scrollWidth, wide,
    sections: [...document.querySelectorAll("section")].map(each => each.id)};
})()"""
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
    assert not re.search(r"url\(|@import", written)
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
        layout = browser.ask(written, LAYOUT, width)
        assert layout == {"inner": width, "scroll": width, "wide": [], "sections": SECTIONS}


def test_logs_are_filtered_and_bars_tell_their_numbers(trained: Run, browser: Browser) -> None:
    found = browser.ask(page(trained), FILTER)
    lines = len([line for line in trained.logs if "is at step" in line.text])
    assert lines == 6
    assert not found["hidden"]
    assert found["counts"][0] > lines
    assert found["counts"][1:] == [3, 1, 0]
    assert found["tip"].startswith("compute: ")


def test_a_kept_run_gives_the_same_page(trained: Run) -> None:
    def lasting(text: str) -> str:
        return re.sub(r"<footer>.*?</footer>", "", text)

    assert lasting(page(load_run(trained.run_id))) == lasting(page(trained))


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
    marker = Marker(**{**dict.fromkeys(Marker.__struct_fields__, 0), **MARKER})
    run._checkpoints.append(Checkpoint(LocalFolder(Path("/work")), marker))
    return run


MARKER = {"name": HOSTILE, "metrics": {HOSTILE: 1.0}, "step": 3, "size": 10, "kind": "torch"}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_texts_of_users_run_nothing_and_fit_the_page(width: int, browser: Browser) -> None:
    written = page(hostile_run())
    found = browser.ask(written, LAYOUT, width)
    assert (found["inner"], found["scroll"], found["wide"]) == (width, width, [])
    assert found["sections"] == [*SECTIONS[:7], "failures", *SECTIONS[7:]]
    count = "[document.title, document.scripts.length, document.images.length]"
    title, scripts, images = browser.ask(written, count, width)
    assert title.endswith(": failed")
    assert "<script>" in title  # as a text
    assert (scripts, images) == (1, 0)  # the page's own


def test_the_page_of_a_thousand_ranks_opens(browser: Browser) -> None:
    written = page(made_up_run(1000, 12, slow_rank=617))
    found = browser.ask(written, LAYOUT, PHONE)
    assert (found["scroll"], found["wide"]) == (PHONE, [])


def test_the_browser_reports_errors_and_what_a_page_may_not_do(
    browser: Browser, tmp_path: Path
) -> None:
    broken = page(made_up_run(1, 1)).replace("</body>", "<script>missing()</script></body>")
    (tmp_path / "broken.html").write_text(broken)
    _, said = browser.open((tmp_path / "broken.html").as_uri())
    assert "Content Security Policy" in "".join(said)
