"""One trace of a run: the clocks of two hosts and of the driver, and the files that it merges."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.slots import RankInfo
from horovod_runner.driver.detached.keeper import Keeper
from horovod_runner.results import run_log, saved_run
from horovod_runner.results.run import Attempt, Run, Timings, TraceFile
from horovod_runner.results.run_log import RunLog
from horovod_runner.results.trace.arrivals import Arrivals
from horovod_runner.wire.events import Notice, RanksPlaced, Report, Untraced
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.measurements import Machine, Profile
from horovod_runner.wire.messages import FilePart
from horovod_runner.worker.profiling.clock import clock as batches
from horovod_runner.worker.profiling.framework_profiler import METADATA, FrameworkProfiler
from horovod_runner.worker.profiling.steps import optimizer_steps
from tests import traces
from tests.made_up_runs import keep

BEGAN = 1_700_000_000.0
AHEAD = 2.5  # seconds by which the clock of rank 1's host is ahead
BEHIND = 7.0  # seconds by which the driver's clock is behind
DELAY = 0.002  # seconds of the fastest message to the driver


def clock(rank: int, seconds: float) -> float:
    """What the clock of a rank's host shows, some seconds after the start of the run."""
    return BEGAN + seconds + (AHEAD if rank else 0.0)


def driver(seconds: float) -> float:
    """What the driver's clock shows."""
    return BEGAN + seconds - BEHIND


def run_on_two_hosts(*traces: TraceFile) -> Run:
    """A run of two ranks that begin to train after 10 s, and make three summaries each."""
    run = Run(
        "0a1b2c3d",
        2,
        main="train",
        status="finished",
        attempts=[Attempt(1, driver(1.0), driver(20.0))],
        timings=Timings(driver(0.0), driver(1.0), driver(10.0), driver(12.0), driver(20.0)),
        traces=[*traces],
    )
    recorder = RunLog(run)
    ranks = [RankInfo(rank, host, 10 + rank, (), None) for rank, host in enumerate("ab")]
    recorder.add([RanksPlaced(ranks)])
    for number in (11, 12, 13):
        for rank in (0, 1):
            sent = clock(rank, number)
            starts = [(number, 100, 500_000)]  # half a second before
            spent = {"waiting": 0.25}
            summary = Profile(rank, sent, 1.0, {"optimizer": 10}, spent, arrivals=starts, cpu=0.5)
            run.profile.add(summary, driver(number) + DELAY * (1 + rank))
            run.profile.add_machine(Machine(rank, sent, 1.0, cores=1.5, of_cores=2, memory=10**9))
    run._metrics.extend([Report(1, {"loss": 0.5}, 9, 0, clock(1, 12.5))], 1)
    recorder.add([RanksPlaced([rank._replace(exit_code=0) for rank in ranks])])  # at the end
    return run


def merged(run: Run, folder: Path) -> tuple[list[traces.Event], list[str]]:
    path = folder / "trace.json"
    missing = run.trace(path)
    return traces.read(path), missing


def test_the_events_of_one_moment_line_up_although_clocks_differ(tmp_path: Path) -> None:
    events, missing = merged(run_on_two_hosts(), tmp_path)
    assert missing == []
    second = 1e6
    for name in ("rank 0 on a", "rank 1 on b", "host a", "host b"):
        pid = traces.process(events, name)
        times = [e["ts"] for e in events if e["ph"] == "C" and e["pid"] == pid]
        # From the driver's call on: late by the time that a message takes.
        assert min(times) == pytest.approx(10 * second + DELAY * second, abs=10)
        assert max(times) == pytest.approx(13 * second + DELAY * second, abs=10)
    assert traces.moments(events, "run called") == [pytest.approx(0, abs=2)]
    (began,) = traces.moments(events, "main began")
    assert began == pytest.approx(10 * second, abs=10)
    (epoch,) = traces.moments(events, "epoch 0")
    assert epoch == pytest.approx(12.5 * second + DELAY * second, abs=10)
    assert len(traces.moments(events, "main ended, exit code 0")) == 2


def test_a_record_keeps_what_the_trace_is_made_of(tmp_path: Path) -> None:
    run = run_on_two_hosts(TraceFile(0, "torch", str(torch_trace(tmp_path, 0))))
    run_log.save(run, tmp_path / "a.run")
    again, _ = merged(run_log.load(tmp_path / "a.run"), tmp_path)
    assert again == merged(run, tmp_path)[0]


def test_counters_say_where_each_second_goes(tmp_path: Path) -> None:
    events, _ = merged(run_on_two_hosts(), tmp_path)
    pid = traces.process(events, "rank 1 on b")
    counts = {(e["name"], e["ts"]): e["args"] for e in events if e["pid"] == pid and e["ph"] == "C"}
    first = min(ts for name, ts in counts if name == "steps")
    assert counts["steps", first] == {"per second": 10.0}
    assert counts["CPU", first] == {"cores": 0.5}
    spent = {"compute": 750.0, "waiting": 250.0, "moving": 0, "data": 0}
    assert counts["ms per second", first] == {**spent, "report": 0, "checkpoint": 0}
    last = max(ts for name, ts in counts if name == "steps")
    assert counts["steps", last] == {"per second": 0.0}  # nothing after the last summary


def test_what_was_measured_in_no_time_is_not_counted(tmp_path: Path) -> None:
    run = run_on_two_hosts()
    run.profile.add_machine(Machine(0, clock(0, 14), 0.0, cores=9.0))
    events, _ = merged(run, tmp_path)
    busy = [e["args"]["busy"] for e in events if e["ph"] == "C" and e["name"] == "cores"]
    assert busy
    assert 9.0 not in busy


def test_ranks_of_a_host_share_its_clock(tmp_path: Path) -> None:
    run = run_on_two_hosts()
    run.ranks = [rank._replace(host="a") for rank in run.ranks]
    events, _ = merged(run, tmp_path)
    times = {
        pid: min(e["ts"] for e in events if e["ph"] == "C" and e["pid"] == pid)
        for pid in (traces.process(events, f"rank {rank} on a") for rank in (0, 1))
    }
    first, second = times.values()
    assert second - first == pytest.approx(AHEAD * 1e6, abs=10)


def test_a_failure_and_its_restart_are_seen(tmp_path: Path) -> None:
    run = run_on_two_hosts()
    run.attempts[:] = [
        Attempt(1, driver(1.0), driver(5.0), error="ValueError: no"),
        Attempt(2, driver(6.0), driver(20.0), resumed_from=3),
    ]
    RunLog(run).add([Notice("attempt 2 begins\nin 1 s")])
    events, _ = merged(run, tmp_path)
    assert traces.moments(events, "attempt 1 failed: ValueError: no")
    pid = traces.process(events, "run 0a1b2c3d: train")
    (first,), (second,) = (traces.spans(events, pid, f"attempt {n}") for n in (1, 2))
    assert first == pytest.approx((1e6, 5e6), abs=10)
    assert second == pytest.approx((6e6, 20e6), abs=10)
    assert traces.moments(events, "attempt 2 begins")


def test_checkpoints_of_earlier_runs_are_not_in_the_trace(tmp_path: Path) -> None:
    run = run_on_two_hosts()
    for run_id, saved in (("earlier", clock(0, -604_800.0)), (run.run_id, clock(0, 12.0))):
        marker = Marker("c.bin", 1, 7, "bytes", 5, "00", run_id, 1, saved)
        run._checkpoints.append(Checkpoint("/folder", marker))
    events, _ = merged(run, tmp_path)
    assert traces.moments(events, "run called") == [pytest.approx(0, abs=2)]
    assert traces.moments(events, "checkpoint of step 7") == [pytest.approx(12e6, abs=1e4)]


def test_the_current_attempt_of_a_run_lasts_until_its_record_was_written(tmp_path: Path) -> None:
    run = run_on_two_hosts()
    run.status, run.timings.end, run.attempts[0].ended = "running", None, None
    run.recorded = driver(15.0)
    events, _ = merged(run, tmp_path)
    (attempt,) = traces.spans(
        events, traces.process(events, f"run {run.run_id}: train"), "attempt 1"
    )
    assert attempt == pytest.approx((1e6, 15e6), abs=1e4)


def test_without_summaries_the_trace_says_that_clocks_are_not_aligned(tmp_path: Path) -> None:
    events, missing = merged(Run("0a1b2c3d", 2), tmp_path)
    assert traces.moments(events, "run called") == [pytest.approx(0, abs=2)]
    (sentence,) = missing
    assert "the clocks of hosts are not aligned" in sentence


def torch_trace(folder: Path, rank: int, seconds: float = 11.0) -> Path:
    """A trace as torch writes it, of a step of 4 ms that began at a moment of the run."""
    base = int(BEGAN) * 10**9 - 10**15
    begin = round((clock(rank, seconds) - BEGAN) * 1e6) + 10**12  # microseconds after the base
    place = {"pid": 500 + rank, "tid": 500 + rank}
    gpu = {"pid": 0, "tid": 7}
    kernel = {"cat": "kernel", "name": "gemm", "ts": begin + 1000.5, "dur": 200.0, **gpu}
    head = {
        "schemaVersion": 1,
        "horovod_runner": {
            "began": base + begin * 1000,
            "steps": [(9, base + begin * 1000), (10, base + begin * 1000 + 4000000)],
        },
        "baseTimeNanoseconds": base,
    }
    python, stream = {"name": "python"}, {"name": "stream 7 "}
    arrow = {"id": 7, "cat": "ac2g", "name": "ac2g"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": begin, **place, "args": python},
        {"ph": "M", "name": "thread_name", "ts": begin, **gpu, "args": stream},
        {"ph": "X", "name": "aten::mm", "ts": begin + 0.125, "dur": 300.25, **place},
        {"ph": "s", **arrow, "ts": begin + 0.125, **place},
        {"ph": "f", **arrow, "ts": begin + 1000.5, "bp": "e", **gpu},
        {"ph": "X", **kernel},
        {"ph": "X", "cat": "Trace", "pid": "Spans", "tid": "x", "name": "y", "ts": begin, "dur": 1},
        {"ph": "i", "s": "g", "name": "Window End", "pid": "", "tid": "", "ts": begin + 5000},
    ]  # fmt: skip
    text = json.dumps(head, indent=2)[:-2] + ',\n "traceEvents": ' + json.dumps(events)
    path = folder / f"rank-{rank}.torch.json.gz"
    path.write_bytes(gzip.compress((text + ', "traceName": "x" }').encode()))
    return path


def test_torchs_traces_of_two_hosts_line_up(tmp_path: Path) -> None:
    files = [TraceFile(rank, "torch", str(torch_trace(tmp_path, rank))) for rank in (0, 1)]
    events, missing = merged(run_on_two_hosts(*files), tmp_path)
    assert missing == []
    flows = set()
    for rank, host in enumerate("ab"):
        pid = traces.process(events, f"rank {rank} on {host}")
        (operation,), (kernel,) = (traces.spans(events, pid, n) for n in ("aten::mm", "gemm"))
        begin = 11e6 + DELAY * 1e6
        assert operation == pytest.approx((begin, begin + 300), abs=10)
        assert kernel == pytest.approx((begin + 1000, begin + 1200), abs=10)
        assert traces.spans(events, pid, "step 10") == [
            pytest.approx((begin, begin + 4000), abs=10)
        ]
        assert "torch, stream 7" in traces.threads(events, pid)
        joined = {e["id"] for e in events if e["ph"] in "sf" and e["pid"] == pid}
        assert len(joined) == 1
        flows |= joined
    assert len(flows) == 2  # an arrow leads from no rank to another


def test_without_summaries_torchs_traces_are_on_the_time_line(tmp_path: Path) -> None:
    run = Run("0a1b2c3d", 2, timings=Timings(clock(0, 60.0)))  # a driver a minute ahead
    run.traces.append(TraceFile(0, "torch", str(torch_trace(tmp_path, 0))))
    events, _ = merged(run, tmp_path)
    assert traces.moments(events, "run called") == [pytest.approx(49e6, abs=10)]


def test_a_torch_trace_that_was_cut_counts_up_to_there(tmp_path: Path) -> None:
    path = torch_trace(tmp_path, 0)
    text = gzip.decompress(path.read_bytes())
    fill = b'"aten::mm", "args": {"x": "' + os.urandom(1 << 20).hex().encode() + b'"}'
    path.write_bytes(gzip.compress(text.replace(b'"gemm"', fill), 0)[: -(1 << 20)])
    events, missing = merged(run_on_two_hosts(TraceFile(0, "torch", str(path))), tmp_path)
    assert missing == [f"The file {path} is cut: its last events are missing."]
    assert len(traces.spans(events, traces.process(events, "rank 0 on a"), "aten::mm")) == 1


def timeline(folder: Path, began: float, tail: str = "]") -> Path:
    """A timeline as Horovod writes it: two reductions, the second one within a microsecond."""
    start = {"start_time_since_epoch_in_micros": round(began * 1e6)}
    reduced = {"dtype": "float32", "shape": "[3]"}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": start},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.w"}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 100, "pid": 1},
        {"ph": "X", "name": "1", "ts": 120, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 130, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 130, "pid": 1},
        {"ph": "B", "name": "MPI_ALLREDUCE", "ts": 130, "pid": 1},
        {"ph": "E", "ts": 130, "pid": 1},
        {"ph": "E", "ts": 140, "pid": 1, "args": reduced},
        {"ph": "i", "name": "CYCLE_START", "ts": 150, "s": "g"},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 160, "pid": 1},
    ]
    path = folder / "timeline.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + tail)
    return path


def test_horovods_timeline_begins_when_horovod_did(tmp_path: Path) -> None:
    file = TraceFile(0, "horovod", str(timeline(tmp_path, clock(0, 9.0))))
    events, missing = merged(run_on_two_hosts(file), tmp_path)
    assert missing == []
    pid = traces.process(events, "Horovod's timeline, of rank 0")
    began = 9e6 + DELAY * 1e6
    assert traces.spans(events, pid, "ALLREDUCE") == [
        pytest.approx((began + 130, began + 140), abs=10)
    ]
    assert traces.moments(events, "rank 1 is ready") == [pytest.approx(began + 120, abs=10)]
    in_order = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid]
    # An outer span comes first; the last one was open at the end of the file.
    negotiation = "NEGOTIATE_ALLREDUCE"
    assert in_order == [negotiation, "ALLREDUCE", "MPI_ALLREDUCE", negotiation]
    shapes = [e["args"] for e in events if e.get("args", {}).get("dtype")]
    assert shapes == [{"dtype": "float32", "shape": "[3]"}]


def test_a_timeline_that_was_cut_counts_up_to_there(tmp_path: Path) -> None:
    path = timeline(tmp_path, clock(0, 9.0), tail=',\n{"ph": "E", "ts"')
    events, missing = merged(run_on_two_hosts(TraceFile(0, "horovod", str(path))), tmp_path)
    assert missing == [f"The file {path} is cut: its last events are missing."]
    assert len([e for e in events if e["name"] == "NEGOTIATE_ALLREDUCE"]) == 2


def test_files_that_are_no_traces_of_the_run_are_left_out(tmp_path: Path) -> None:
    other = timeline(tmp_path, clock(0, 100_000.0))
    damaged = tmp_path / "rank-0.torch.json.gz"
    damaged.write_bytes(torch_trace(tmp_path, 0).read_bytes()[:50])
    no_trace = tmp_path / "x.json"
    no_trace.write_text("{}")
    run = run_on_two_hosts(
        TraceFile(0, "horovod", str(other)),
        TraceFile(0, "torch", str(damaged)),
        TraceFile(1, "torch", str(no_trace)),
        TraceFile(1, "torch", str(tmp_path / "gone.json")),
        TraceFile(1, "tensorflow", "a.zip"),
    )
    _, missing = merged(run, tmp_path)
    text = "\n".join(missing)
    assert f"{other} is left out: it is of another run, which wrote the same file" in text
    assert f"{damaged} is left out" in text
    assert f"{no_trace} is left out: it is not a trace" in text
    assert "No such file" in text
    assert "TensorFlow's profile of rank 1 is not merged: a.zip" in text


@pytest.fixture
def records(own_records: None) -> Path:
    return saved_run.folder()


def test_pieces_of_a_trace_become_a_file_that_only_the_user_reads(records: Path) -> None:
    arrived = Arrivals("0a1b2c3d", True)
    name = "torch.json.gz"
    assert arrived.part(FilePart(3, name, 0, b"first ")) is None
    assert arrived.part(FilePart(3, name, 6, b"second")) is None
    assert [path for path in records.iterdir() if not path.name.startswith(".")] == []
    path = records / f"0a1b2c3d-rank-3.{name}"
    assert arrived.part(FilePart(3, name, 12, b"")) == TraceFile(3, "torch", str(path))
    assert path.read_bytes() == b"first second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert arrived.count == 1


@pytest.mark.parametrize("name", ["timeline", "../x", "torch.json", ""])
def test_other_files_than_traces_are_refused(records: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}', .*expected"):
        Arrivals("0a1b2c3d", True).part(FilePart(0, name, 0, b"x"))
    with pytest.raises(ValueError, match=r"'torch\.json\.gz', .*expected"):
        Arrivals("0a1b2c3d", False).part(FilePart(0, "torch.json.gz", 0, b"x"))


def test_a_gap_or_too_many_bytes_are_refused(tmp_path: Path) -> None:
    with Arrivals("0a1b2c3d", tmp_path / "new", most_of_rank=100) as arrived:
        with pytest.raises(ValueError, match=r"torch\.json\.gz .*follow"):
            arrived.part(FilePart(0, "torch.json.gz", 5, b"x"))
        with pytest.raises(ValueError, match=r"rank 0 .*large"):
            arrived.part(FilePart(0, "torch.json.gz", 0, bytes(101)))
    assert list((tmp_path / "new").iterdir()) == []


def test_beside_the_record_there_is_room_for_so_much(records: Path) -> None:
    arrived = Arrivals("0a1b2c3d", True, most=100)
    arrived.part(FilePart(0, "torch.json.gz", 0, bytes(80)))
    with pytest.raises(OSError, match=r"more than 100 B, .*torch_profiler="):
        arrived.part(FilePart(1, "torch.json.gz", 0, bytes(80)))
    assert arrived.part(FilePart(1, "torch.json.gz", 80, bytes(80))) is None  # its rest
    assert arrived.part(FilePart(0, "torch.json.gz", 80, b"")) is not None
    assert [path.name for path in records.iterdir()] == ["0a1b2c3d-rank-0.torch.json.gz"]


def test_in_detached_mode_a_text_stands_for_all_traces() -> None:
    keeper = Keeper()
    for rank in (1, 0):
        for data in (b"x", b""):
            keeper.take(FilePart(rank, "torch.json.gz", 0, data))
    (kept,) = keeper.kept
    assert isinstance(kept, Untraced)
    assert "In detached mode no files come back" in kept.reason


def test_traces_are_deleted_with_their_record(records: Path) -> None:
    old, new, left = (f"{letter}a1b2c3d" for letter in "abc")
    for run_id in (old, new, left):
        arrived = Arrivals(run_id, True)
        arrived.part(FilePart(0, "torch.json.gz", 0, b"x"))
        arrived.part(FilePart(0, "torch.json.gz", 1, b""))
    os.utime(records / f"{left}-rank-0.torch.json.gz", (1, 1))  # its driver was killed long ago
    keep(Run(old, 1), most_runs=1)
    os.utime(records / f"{old}.run", (1, 1))
    keep(Run(new, 1), most_runs=1)
    assert {path.name for path in records.iterdir()} == {
        f"{new}.run",
        f"{new}-rank-0.torch.json.gz",
    }


def test_steps_of_the_optimizer_are_recorded_once_it_makes_its_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # another test may have imported TensorFlow
    for what, name in ((batches, "after"), (batches, "batches"), (optimizer_steps, "count")):
        monkeypatch.setattr(what, name, None if name == "after" else 0)
    failed: list[str] = []
    profiler = FrameworkProfiler(str(tmp_path / "rank-0"), failed.append)
    for number in range(1, 300):
        batches.count_batch(1)
        if number % 16 == 0:  # gradients of so many batches are accumulated
            optimizer_steps.count += 1
            batches.end_step()
    profiler.finish(ok=True)
    assert failed == []
    written = json.loads(gzip.decompress((tmp_path / "rank-0.torch.json.gz").read_bytes()))
    assert [step for step, _ in written[METADATA]["steps"]] == [*range(1, 13)]
