"""`horovod-runner verify` on CPUs: the command with its page in a browser, and each check.

tests/unit/test_verify.py tests what the figures of GPUs mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.tools.verify import machine, registry
from horovod_runner.tools.verify.check import VerifyCase, missing
from horovod_runner.tools.verify.checks import placement
from tests.browser import Browser, browser
from tests.conftest import Ranks
from tests.preload import COMMAND
from tests.programs import run

__all__ = ["browser"]

pytestmark = [pytest.mark.horovod, pytest.mark.places("local"), pytest.mark.xdist_group("verify")]

PHONE, DESKTOP = 390, 1280
# What overflows the page to the right, but not in a box of its own that scrolls.
LAYOUT = """(() => {
  const wide = [];
  for (const each of document.querySelectorAll("main *")) {
    if (each.getBoundingClientRect().right > innerWidth + 0.5 && !each.closest("pre"))
      wide.push([each.tagName, each.getAttribute("class")]);
  }
  return {scroll: document.documentElement.scrollWidth, wide,
    sections: [...document.querySelectorAll("section")].map(each => each.id)};
})()"""
#: Without GPUs. `failures` looks at all processes of its own process, so the command runs it.
#: Keras runs on torch here, as tests/real/test_keras.py runs both. A single rank would start cold,
#: because it has more threads; `resnet50-all` is the same training.
ON_CPUS = [
    check.name
    for check in registry.CHECKS
    if not check.needs.gpus and check.name not in {"failures", "keras-tensorflow", "resnet50"}
]


class WarmCase(VerifyCase, frozen=True):
    """A case whose ranks are forked with their framework imported."""

    def runner(self, np: int, framework: str = "torch", **options: Any) -> HorovodRunner:
        if "env" not in options:  # with variables of its own, a run needs a server of its own
            options.setdefault("preload_frameworks", [f"horovod.{framework}"])
        return super().runner(np, framework, **options)


@pytest.fixture(scope="module")
def here() -> machine.ThisMachine:
    """This machine without its GPUs."""
    return machine.look((), ("torch",))


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_check_finds_all_well_on_cpus(
    name: str, here: machine.ThisMachine, tmp_path: Path, ranks: Ranks
) -> None:
    check = registry.find(name)
    reason = missing(check.needs, here)
    if reason:
        pytest.skip(reason)
    readings = list(check.function(WarmCase(here, True, str(tmp_path))))
    assert readings
    assert [reading for reading in readings if reading.ok is False] == []
    assert any(reading.ok for reading in readings) or name == "allreduce"  # speeds alone


def test_gradients_can_be_reduced_on_the_cpu(ranks: Ranks) -> None:
    steps = ranks.runner(2).run_all(placement.train_a_step)
    assert [reading.ok for reading in placement.read_steps(steps, "cpu")] == [True, True]


def test_the_command_runs_checks_and_writes_a_page(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    command = [COMMAND, "verify", "--quick", "--gpus", "0"]
    done = run(*command, "--only", "refused,mask,failures", "--json", "-o", page)
    found = json.loads(done.stdout)
    results = {result["name"]: result for result in found["results"]}
    assert (found["ok"], done.returncode) == (True, 0), found
    statuses = {name: result["status"] for name, result in results.items()}
    assert statuses == {"refused": "passed", "mask": "skipped", "failures": "passed"}
    assert results["mask"]["reason"] == "needs 1 GPU, and no GPUs can be used"
    seen = [(reading["name"], reading["seen"]) for reading in results["failures"]["readings"]]
    assert ("killed: error of the run", "RankFailedError") in seen
    assert ("exception: processes left", "0") in seen
    dom, said = browser.open(page.as_uri())
    assert said == []
    assert "No GPU was used" in dom
    for width in (PHONE, DESKTOP):
        layout = browser.ask(page.read_text(), LAYOUT, width)
        expected = {"scroll": width, "wide": [], "sections": ["refused", "failures", "skipped"]}
        assert layout == expected
