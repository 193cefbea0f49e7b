"""Traces of real runs: Horovod's timeline and torch's profiler, on one clock with the summaries."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from horovod_runner import load_run
from horovod_runner.results.run import Run, TraceFile
from horovod_runner.sinks import Sink
from horovod_runner.tools.commands import cli
from tests import traces
from tests.conftest import Ranks

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("nothing_left")]


def train(steps: int, fails_at: int = -1) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(1, steps + 1):
        with torch.profiler.record_function(f"in step {step}"):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
        with torch.profiler.record_function("reduce the probe"):
            hvd.allreduce(torch.ones(3), name="probe")
        if step == fails_at:
            raise ArithmeticError("as asked for")
        optimizer.step()


def names(trace: TraceFile) -> list[str]:
    """The names of the events in a trace of torch."""
    events = json.loads(gzip.decompress(Path(trace.path).read_bytes()))["traceEvents"]
    return [event["name"] for event in events]


def steps_in(trace: TraceFile) -> set[str]:
    return {name for name in names(trace) if name.startswith("in step ")}


class Kept(Sink):
    """Keeps the traces that it gets."""

    def __init__(self) -> None:
        self.traces: list[TraceFile] = []

    def trace(self, trace: TraceFile) -> None:
        self.traces.append(trace)


@pytest.mark.places("local")
def test_one_trace_has_the_collectives_and_the_operations_of_all_ranks_on_one_clock(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    timeline = tmp_path / "timeline.json"
    runner = ranks.runner(2, timeline=timeline, torch_profiler=True, sinks=[kept])
    runner.run(train, steps=30)
    run = runner.last_run
    assert run is not None
    by_kind = {(trace.kind, trace.rank) for trace in run.traces}
    assert by_kind == {("horovod", 0), ("torch", 0), ("torch", 1)}
    assert {*kept.traces} == {*run.traces}
    for trace in run.traces:
        if trace.kind == "torch":
            assert steps_in(trace) == {f"in step {step}" for step in range(10, 21)}
            assert names(trace).count("aten::linear") == 11
    path = tmp_path / "trace.json.gz"
    assert run.trace(path) == []
    events = traces.read(path)
    pids = {
        rank.rank: traces.process(events, f"rank {rank.rank} on {rank.host}") for rank in run.ranks
    }
    probes = [traces.spans(events, pids[rank], "reduce the probe") for rank in (0, 1)]
    horovod = traces.process(events, "Horovod's timeline, of rank 0")
    probe = traces.threads(events, horovod)["allreduce.probe"]
    reductions = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if (e["pid"], e["tid"], e["name"]) == (horovod, probe, "ALLREDUCE")
    ]
    assert len(reductions) == 30
    # Both ranks are in the call while Horovod reduces, by the clocks of three files.
    for first, second, (begin, end) in zip(*probes, reductions[9:20], strict=True):
        assert max(first[0], second[0], begin) < min(first[1], second[1], end)
    for pid in pids.values():
        for step in range(10, 21):
            (times,) = traces.spans(events, pid, f"step {step}")
            (inside,) = traces.spans(events, pid, f"in step {step}")
            assert times[0] < inside[0] < inside[1] < times[1]
    # The command writes the same trace from the run's record.
    again = tmp_path / "again.json"
    assert cli.main(["trace", run.run_id, "-o", str(again)]) == 0
    assert str(again) in capsys.readouterr().out
    assert len(traces.read(again)) == len(events)
    assert load_run(run.run_id).traces == run.traces


def test_a_rank_that_fails_brings_the_steps_that_it_has_made(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    runner = ranks.runner(2, torch_profiler=folder)
    with pytest.raises(ArithmeticError):
        runner.run(train, steps=30, fails_at=13)
    run = runner.last_run
    assert run is not None
    assert run.traces
    for trace in run.traces:  # the driver may have ended the other rank before it wrote its file
        assert Path(trace.path) == folder / f"{run.run_id}-rank-{trace.rank}.torch.json.gz"
        assert steps_in(trace) == {f"in step {step}" for step in range(10, 14)}


def notices(run: Run | None) -> str:
    assert run is not None
    return "\n".join(line.text for line in run.logs if line.stream == "notice")


@pytest.mark.places("local")
def test_too_few_steps_are_one_notice(ranks: Ranks) -> None:
    runner = ranks.runner(2, torch_profiler=True)
    runner.run(train, steps=5)
    assert runner.last_run is not None
    assert runner.last_run.traces == []
    assert notices(runner.last_run).count("It counted 5 steps") == 1


@pytest.mark.places("local")
def test_a_profiler_in_main_keeps_its_events(ranks: Ranks) -> None:
    def main() -> int:
        import torch

        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.profiler.profile() as profiler:
            for _ in range(30):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
        return [event.name for event in profiler.events()].count("aten::linear")

    runner = ranks.runner(2, torch_profiler=True)
    assert runner.run(main) == 30
    assert "main uses torch's profiler itself at step 10" in notices(runner.last_run)


@pytest.mark.places("local")
@pytest.mark.cold  # TensorFlow would stay in the fork servers of the other tests
def test_tensorflows_own_profiler_records_where_torch_does_not_train(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.needs_tensorflow()

    def main() -> None:
        import tensorflow as tf

        from horovod_runner import report

        x = tf.ones([400, 400])
        for step in range(60):
            for _ in range(10):
                x = tf.matmul(x, x) / 400
            report(sum=float(tf.reduce_sum(x)), step=step)

    runner = ranks.runner(1, torch_profiler=tmp_path)
    runner.run(main)
    assert runner.last_run is not None
    (trace,) = runner.last_run.traces
    assert trace.kind == "tensorflow"
    with zipfile.ZipFile(trace.path) as archive:
        (profile,) = [name for name in archive.namelist() if name.endswith("rank-0.xplane.pb")]
        assert b"MatMul" in archive.read(profile)
