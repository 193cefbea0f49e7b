"""Slow trainings, and whether the diagnosis names the cause and the rank.

Two ranks train a small network, slow on purpose in one of many ways (slow_trainings.py), or with
nothing wrong. Each training has its own driver process. A cause counts as named if it is the first
finding, with the right rank. A plain training counts as accused if there is any finding.

    python benchmarks/diagnose.py [--only sleeps quota] [--plain 10] [--steps 300]

Needs two cores that have nothing else to do. The quota needs cgroups, and the slow link the `tc` of
iproute2 and network namespaces: both need root, and are left out elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report
import slow_trainings

_LIMIT_SECONDS = 300.0
_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
_QUOTA = 0.6  # of a core
_LINK = "rate 1gbit burst 128kb latency 50ms"


class Cause(NamedTuple):
    """A way to be slow.

    Attributes:
        title: its name in the table.
        main: the function of slow_trainings.
        found: the cause and rank, or the cause and reason, of the finding that names it.
        text: a regular expression that its text must match.
        data: the dataset that the function takes: "numbers" or "photos".
        around: what happens around the training: "burners", "quota" or "link".
        share: of the steps; less where a step takes long.
    """

    title: str
    main: str
    found: tuple[str, int | None, str]
    text: str = ""
    data: str = ""
    around: str = ""
    share: float = 1.0


CAUSES = {
    "sleeps": Cause(
        "a rank sleeps in its compute", "sleeps", ("slow rank", 1, "compute"), "augment_slowly"
    ),
    "counts": Cause(
        "a rank computes in Python", "counts", ("slow rank", 1, "compute"), "count_slowly"
    ),
    "metric": Cause(
        "a rank is late at a reduction",
        "late_at_a_metric",
        ("slow rank", 1, "compute"),
        "augment_slowly",
    ),
    "feed": Cause(
        "the feed of a rank is slow",
        "slow_feed",
        ("slow rank", 1, "data"),
        "transform",
        data="numbers",
    ),
    "batches": Cause("a rank has larger batches", "larger_batches", ("slow rank", 1, "batches")),
    "lengths": Cause("lengths of batches differ", "uneven_lengths", ("uneven steps", None, "")),
    "quota": Cause(
        "a container's CPU quota", "with_quota", ("slow rank", 1, "quota"), around="quota"
    ),
    "others": Cause(
        "other processes need the cores",
        "plain",
        ("cpu", None, "others"),
        "other processes",
        around="burners",
    ),
    "threads": Cause("too many threads", "many_threads", ("cpu", None, "threads")),
    "lock": Cause(
        "threads hold the interpreter lock",
        "lock_held",
        ("interpreter lock", None, ""),
        "count",
        share=0.2,
    ),
    "decode": Cause(
        "images are decoded again",
        "decoded_again",
        ("data", None, ""),
        'column "photo"',
        data="photos",
    ),
    "dataset": Cause(
        "a DataLoader without processes",
        "slow_dataset",
        ("data", None, ""),
        "count_slowly|__getitem__",
    ),
    "loader": Cause(
        "a DataLoader with one process",
        "slow_loader_processes",
        ("data", None, ""),
        "augment_slowly|__getitem__",
    ),
    "link": Cause(
        "a slow link", "large_gradients", ("communication", None, ""), around="link", share=0.25
    ),
    "checkpoint": Cause(
        "a checkpoint in every step", "large_checkpoints", ("slow rank", 0, "checkpoint")
    ),
    "report": Cause("3,000 metrics in every step", "many_reports", ("report", 0, "")),
    "small": Cause("too small to be distributed", "small", ("small steps", None, "")),
    "warm-up": Cause("the first steps compile", "slow_start", ("warm-up", None, "")),
    "ddp": Cause("a rank sleeps, with DDP", "ddp", ("slow rank", 1, "compute"), "augment_slowly"),
    "keras": Cause(
        "a callback of a rank sleeps", "keras", ("slow rank", 1, "compute"), "augment_slowly"
    ),
}
PLAIN = ("plain", "plain_ddp", "plain_keras", "plain_feed")


def run_here(main: str, steps: int, data: str, group: str, *, gloo: bool) -> None:
    """Run one training in this process, and print what was found as JSON."""
    from horovod_runner import ClusterConfig, HorovodRunner
    from horovod_runner.data import parquet

    arguments: dict[str, Any] = {"steps": steps}
    if data:
        arguments["data"] = parquet(data)
    if group:
        arguments["group"] = group
    collectives = "gloo" if gloo else "auto"
    runner = HorovodRunner(
        np=-2, progress=False, cluster_config=ClusterConfig(cpu_collectives=collectives)
    )
    with contextlib.redirect_stdout(sys.stderr):
        runner.run(getattr(slow_trainings, main), **arguments)
    assert runner.last_run is not None
    diagnosis = runner.last_run.diagnose()
    findings = [[f.cause, f.rank, f.reason, f.text, f.seconds] for f in diagnosis.findings]
    print(json.dumps({"findings": findings, "text": str(diagnosis)}))


def train(main: str, steps: int, data: str = "", around: str = "") -> dict[str, Any]:
    """Run one training in a process of its own; returns what was found."""
    command = [sys.executable, __file__, "--here", main, "--steps", str(steps), "--data", data]
    with contextlib.ExitStack() as kept:
        if around == "burners":
            kept.enter_context(slow_trainings.burners(4))
        elif around == "quota":
            command += ["--group", str(kept.enter_context(_quota()))]
        elif around == "link":
            slow = f'ip link set lo up && tc qdisc add dev lo root tbf {_LINK} && exec "$@"'
            command = ["unshare", "-n", "sh", "-c", slow, "sh", *command, "--gloo"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    if done.returncode:
        return {"findings": [], "text": done.stderr[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def _quota() -> Iterator[Path]:
    group = Path(tempfile.mkdtemp(prefix="horovod_runner-", dir=_GROUPS))
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(round(_QUOTA * 100_000)))
        yield group
    finally:
        group.rmdir()


def can(around: str) -> bool:
    """Whether this machine allows what is done around a training."""
    if around == "quota":
        return os.access(_GROUPS / "cpu.cfs_quota_us", os.F_OK) and os.geteuid() == 0
    if around == "link":
        tried = ["unshare", "-n", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_LINK.split()]
        return bool(shutil.which("tc")) and not subprocess.run(tried, check=False).returncode
    return True


def make_data(folder: Path) -> dict[str, str]:
    """Write the datasets: numbers, and photos as JPEGs."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    random = np.random.default_rng(0)
    photos = []
    for _ in range(64):
        pixels = random.integers(0, 255, (40, 40, 3), np.uint8)
        encoded = io.BytesIO()
        Image.fromarray(pixels).resize((640, 640)).save(encoded, "JPEG")
        photos.append(encoded.getvalue())
    tables = {
        "numbers": pa.table({"x": random.random(256 * 1024, np.float32)}),
        "photos": pa.table({"photo": photos * 4}),
    }
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return {name: str(folder / f"{name}.parquet") for name in tables}


def is_named(cause: Cause, found: dict[str, Any]) -> bool:
    """Whether the first finding is the cause."""
    if not found["findings"]:
        return False
    name, rank, reason, text, _ = found["findings"][0]
    if not re.search(cause.text, text):
        return False
    expected = cause.found
    if (name, rank) == expected[:2] and reason == (expected[2] or reason):
        return True
    # A finding may name the rank that the cause slows down most.
    also = {
        ("cpu", "others"): (("cpu", "others"), ("slow rank", "cpu")),
        ("data", ""): (("slow rank", "data"),),
        ("report", ""): (("slow rank", "report"),),
    }
    fits = (name, reason) in also.get((expected[0], expected[2]), ())
    return fits and expected[1] in (None, rank)


def main() -> None:
    """Run all trainings, and print a table."""
    parser = argparse.ArgumentParser(description="Whether the diagnosis names causes of slowness.")
    parser.add_argument("--only", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--plain", type=int, default=10, help="trainings with nothing wrong")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--show", action="store_true", help="print each diagnosis")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    for hidden in ("--here", "--data", "--group"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.here, options.steps, options.data, options.group, gloo=options.gloo)
        return
    rows, raw, named, tried, accused = [], {}, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for name in options.only:
            cause = CAUSES[name]
            if not can(cause.around):
                print(f"{name}: left out, this machine does not allow it", file=sys.stderr)
                continue
            found = raw[name] = train(
                cause.main,
                round(cause.share * options.steps),
                data.get(cause.data, ""),
                cause.around,
            )
            right = is_named(cause, found)
            tried, named = tried + 1, named + right
            rows.append([cause.title, _first(found), "yes" if right else "NO"])
            _show(name, found, right, options.show)
        for number in range(options.plain):
            main_name = PLAIN[number % len(PLAIN)]
            path = data["numbers"] if main_name == "plain_feed" else ""
            found = raw[f"plain {number}"] = train(main_name, options.steps, path)
            wrong = bool(found["findings"]) or "Nothing stands out" not in found["text"]
            accused += wrong
            rows.append([f"nothing wrong ({main_name})", _first(found), "NO" if wrong else "yes"])
            _show(main_name, found, not wrong, options.show)
    print(f"\n{report.machine()}\n")
    print(report.table(["training", "first finding", "right"], rows))
    totals = [
        ["causes named, of all", *report.at_least("causes named", named / max(1, tried), 13 / 14)],
        ["plain runs accused", *report.at_most("plain runs accused", accused, 0)],
    ]
    print("\n" + report.table(["", "value", "target", ""], totals))
    if options.json:
        report.write_json(options.json, raw)


def _first(found: dict[str, Any]) -> str:
    if not found["findings"]:
        return "nothing"
    name, rank, reason, _, _ = found["findings"][0]
    return f"{name}{'' if rank is None else f' {rank}'}{f' ({reason})' if reason else ''}"


def _show(name: str, found: dict[str, Any], right: bool, show: bool) -> None:
    print(
        f"== {name}: {_first(found)}{'' if right else '  <-- WRONG'}", file=sys.stderr, flush=True
    )
    if show or not right:
        print(found["text"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
