"""What comes back of a run while it goes on and after it, over both launchers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import RankFailedError, log_to_driver, report
from horovod_runner.sinks import Sink
from tests.conftest import Ranks

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]


def train(steps: int) -> str:
    rank = int(os.environ["HOROVOD_RANK"])
    log_to_driver(f"rank {rank} is here")
    for step in range(steps):
        report(loss=1 / (step + 1), rank_of=rank, step=step, epoch=step // 10)
    return "done"


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_rank_0s_reports_are_a_table_afterwards(ranks: Ranks) -> None:
    runner = ranks.runner(2)
    assert runner.run(train, steps=30) == "done"
    table = runner.last_run.metrics
    assert table["step"].to_pylist() == list(range(30))
    assert table["epoch"].to_pylist() == [step // 10 for step in range(30)]
    assert table["loss"].to_pylist() == [1 / (step + 1) for step in range(30)]
    assert set(table["rank"].to_pylist()) == {0}
    assert runner.last_run.dropped_reports == {}
    assert runner.last_run.latest_metrics == {"loss": 1 / 30, "rank_of": 0}


def test_all_ranks_reports_are_when_asked_for(ranks: Ranks) -> None:
    runner = ranks.runner(3, report_ranks="all")
    runner.run(train, steps=5)
    table = runner.last_run.metrics
    assert table["rank"].to_pylist() == table["rank_of"].to_pylist()
    assert table["step"].to_pylist() == list(range(5)) * 3


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_a_run_tells_of_its_ranks_its_moments_and_its_lines(ranks: Ranks) -> None:
    runner = ranks.runner(2)
    assert runner.last_run is None
    runner.run(train, steps=1)
    run = runner.last_run
    assert (run.status, run.np, run.params["steps"]) == ("finished", runner.options.np, 1)
    assert [(each.rank, each.exit_code) for each in run.ranks] == [(0, 0), (1, 0)]
    assert len({each.pid for each in run.ranks}) == 2
    moments = run.timings
    assert moments.queued <= moments.launched <= moments.first_line <= moments.end
    assert moments.first_line <= moments.first_report <= moments.end
    logged = [line.text for line in run.logs if line.stream == "log"]
    assert sorted(logged) == ["rank 0 is here", "rank 1 is here"]
    (attempt,) = run.attempts
    assert (attempt.number, attempt.error, attempt.resumed_from) == (1, "", None)


def test_what_a_killed_rank_reported_has_arrived(ranks: Ranks) -> None:
    def main() -> None:
        for step in range(1000):
            report(loss=1.0, step=step)
        os.kill(os.getpid(), signal.SIGKILL)

    runner = ranks.runner(1)
    with pytest.raises(RankFailedError) as caught:
        runner.run(main)
    assert caught.value.exit_code == -signal.SIGKILL
    run = runner.last_run
    assert run.metrics["step"].to_pylist() == list(range(1000))
    assert run.status == "failed"
    assert run.attempts[0].error.startswith("RankFailedError: rank 0 of 1 on ")
    assert run.ranks[0].exit_code == -signal.SIGKILL


def test_a_sink_of_ones_own_is_told_of_all_in_order_while_the_run_is_readable(
    ranks: Ranks, tmp_path: Path
) -> None:
    looked = tmp_path / "looked"
    os.mkfifo(looked)
    seen: list[Any] = []

    class Events(Sink):
        """Remembers, and looks at the run from its own thread."""

        def begin(self, run: Any) -> None:
            self.run = run
            seen.append("begin")

        def attempt(self, number: int) -> None:
            seen.append(("attempt", number))

        def report(self, report: Any) -> None:
            if report.step == 0:
                seen.append((self.run.metrics.num_rows, self.run.status))
                looked.write_bytes(b"x")
            seen.append((report.rank, report.step, dict(report.metrics)))

        def end(self, run: Any) -> None:
            seen.append(("end", run.status))

    def main() -> None:
        report(loss=0.0, step=0)
        looked.read_bytes()  # until the driver has seen it
        report(loss=1.0, step=1)

    ranks.run(1, main, {"sinks": [Events()]})
    reports = [(0, step, {"loss": float(step)}) for step in range(2)]
    assert seen == ["begin", ("attempt", 1), (1, "running"), *reports, ("end", "finished")]


def test_reports_beyond_what_a_driver_takes_are_counted_and_the_last_arrives(
    ranks: Ranks,
) -> None:
    count = 200_000

    def main() -> None:
        for step in range(count):
            report(loss=float(step), step=step)

    runner = ranks.runner(1)
    runner.run(main)
    run = runner.last_run
    assert run.metrics.num_rows + run.dropped_reports.get(0, 0) == count
    assert run.latest_metrics == {"loss": count - 1}
    assert run.metrics["step"].to_pylist()[-1] == count - 1


def test_a_metric_that_is_no_number_is_the_ranks_own_error(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"'loss' .* got list\."):
        ranks.run(1, lambda: report(loss=[1.0]))
