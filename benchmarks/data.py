"""Speed of data loading: this package's feed, Petastorm, torch's DataLoader, pyarrow and Spark.

The compared systems take turns, each measurement in a separate process (on Spark: one process for
all turns). Ratios are of medians. Loaders have OMP_NUM_THREADS=1 and a warm page cache.

    python benchmarks/data.py [--rounds 3] [--rows narrow frame] [--scale 0.05] [--json data.json]
    python benchmarks/data.py --rows large --large-gb 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import data_loaders
import data_spark
import report
from data_loaders import Figures, Task

_HERE = Path(__file__).resolve().parent
_LIMIT_SECONDS = 3600
_MEASURES: dict[str, Callable[[Task], Figures | list[Figures]]] = {
    **data_loaders.MEASURES,
    **data_spark.MEASURES,
}
_ROWS = {"narrow": 400_000, "vec": 60_000, "jpeg": 10_000}
_FRAME_ROWS = 1_000_000
_NARROW_BYTES = 16 * 4 + 8


class FailedError(Exception):
    """A measurement that did not run; the message is its error."""


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        title: what is compared.
        ours: our figure, as text.
        peer: the peer's figure, as text.
        cells: the ratio, the target and the verdict.
    """

    title: str
    ours: str
    peer: str
    cells: list[str]


class Bench:
    """Runs measurements and keeps their figures.

    Args:
        folder: for data.
        rounds: how often each measurement is repeated.
        scale: factor for the size of the datasets.

    Attributes:
        raw: the figures of each measurement, by row and name; its error if it failed.
        notes: lines below the table.
    """

    def __init__(self, folder: Path, rounds: int, scale: float) -> None:
        self.folder = folder
        self.rounds = rounds
        self.scale = scale
        self.raw: dict[str, dict[str, list[Figures] | str]] = {}
        self.notes: list[str] = []

    def task(self, kind: str, times: float = 1, *, rows: int | None = None) -> Task:
        """A dataset of a kind, created at the first call."""
        count = max(2048, int((rows or _ROWS[kind]) * times * self.scale))
        task = Task(kind, str(self.folder / f"{kind}-{count}"), count, rounds=self.rounds)
        if not Path(task.folder).exists():
            self.measure("make", task)
        return task

    def measure(
        self, name: str, task: Task, variables: dict[str, str] | None = None
    ) -> list[Figures]:
        """Run a measurement in a separate process.

        Returns:
            The figures of each round that the process has measured.

        Raises:
            FailedError: the measurement failed or took too long.
        """
        # Spark's Python workers import this module too.
        path = [str(_HERE), str(_HERE.parent), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TMPDIR": str(self.folder),
            **(variables or {}),
        }
        if name in data_loaders.MEASURES:
            environment["OMP_NUM_THREADS"] = "1"
        result = self.folder / "result"
        result.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--child", name, json.dumps(task), str(result)]
        with (self.folder / "output").open("w+") as output:
            child = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status: int | str = child.wait(_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                status = f"none in {_LIMIT_SECONDS} s"
            finally:
                _end(child)
            output.seek(0)
            printed = output.read()
        if status != 0 or not result.exists():
            raise FailedError(_error(printed) or f"exit status {status}")
        found: list[Figures] = json.loads(result.read_text())
        for figures in found:
            told = ", ".join(f"{key} {value:.6g}" for key, value in figures.items())
            print(f"{name} {Path(task.folder).name}: {told}", file=sys.stderr, flush=True)
        return found

    def take_turns(self, row: str, systems: dict[str, tuple[str, Task]]) -> None:
        """Measure all systems of a row, in a different order each round."""
        found: dict[str, list[Figures]] = {name: [] for name in systems}
        errors: dict[str, str] = {}
        for turn in range(self.rounds):
            for name in random.Random(turn).sample(list(systems), len(systems)):
                if name in errors:
                    continue
                try:
                    found[name] += self.measure(*systems[name])
                except FailedError as error:  # such a peer becomes a line of the table
                    errors[name] = str(error)
                    self.notes.append(f"{row}, {name}: {error}")
        self.raw[row] = {**found, **errors}

    def once(self, row: str, name: str, task: Task, variables: dict[str, str]) -> None:
        """Measure something that has no peer or contains its peers."""
        found = self.raw.setdefault(row, {})
        try:
            found[name] = self.measure(name, task, variables)
        except FailedError as error:
            found[name] = str(error)
            self.notes.append(f"{row}, {name}: {error}")

    @contextmanager
    def packed(self) -> Iterator[dict[str, str]]:
        """Environment variables that name one folder for packed data, for several measurements."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield {"HOROVOD_RUNNER_DATA": folder}

    def figure(self, row: str, name: str, key: str = "rate") -> float | None:
        """The median of a figure; None if it was not measured."""
        found = self.raw[row].get(name)
        return None if not found or isinstance(found, str) else median(one[key] for one in found)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a measurement and all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _error(printed: str) -> str:
    """The last line of the last traceback."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (errors or lines or [""])[-1][:300]


# Rows.


def _rate(value: float | None) -> str:
    if value is None:
        return "failed"
    return f"{value / 1e6:.2f}M/s" if value >= 1e6 else f"{value / 1e3:.1f}k/s"


def _unit(unit: str) -> Callable[[float | None], str]:
    return lambda value: "failed" if value is None else f"{value:.2f} {unit}"


def _compared(
    title: str,
    ours: float | None,
    peer: float | None,
    show: Callable[[float | None], str],
    target: tuple[str, float] | None,
) -> Line:
    """A line with our figure divided by the peer's; the target is (">=" or "<=", number)."""
    if ours is None or peer is None:
        return Line(title, show(ours), show(peer), ["-", "-", "not run"])
    return Line(title, show(ours), show(peer), _cells(title, ours / peer, target))


def _cells(title: str, value: float, target: tuple[str, float] | None) -> list[str]:
    if target is None:
        return [f"{value:.2f}", "-", ""]
    judge = {">=": report.at_least, "<=": report.at_most}[target[0]]
    return [f"{value:.2f}", *judge(title, value, target[1])[1:]]


def _limited(title: str, value: float | None, unit: str, limit: float | None) -> Line:
    """A line with a figure of ours that has a limit and no peer."""
    shown = _unit(unit)(value)
    if value is None:
        return Line(title, shown, "-", ["-", "-", "not run"])
    if limit is None:
        return Line(title, shown, "-", ["-", "-", ""])
    _, told, verdict = report.at_most(title, value, limit, unit)
    return Line(title, shown, "-", ["-", f"{told} {unit}", verdict])


def _loaders(
    bench: Bench,
    row: str,
    kind: str,
    systems: dict[str, str],
    lines: Sequence[tuple[str, str, float | None]],
    *,
    key: str = "rate",
    title: str = "",
) -> Iterator[Line]:
    """Measure and compare the loaders of one row.

    Args:
        bench: measures.
        row: the row's name.
        kind: the kind of the dataset.
        systems: the measurements, by the names of the systems.
        lines: which system of ours is compared with which peer, and the minimum ratio.
        key: the figure that is compared.
        title: the title of the lines; empty for the row's name.
    """
    task = bench.task(kind)
    if row not in bench.raw:
        bench.take_turns(row, {name: (measure, task) for name, measure in systems.items()})
    for own, peer, target in lines:
        figures = bench.figure(row, own, key), bench.figure(row, peer, key)
        judged = None if target is None else (">=", target)
        yield _compared(f"{title or row}: {own} / {peer}", *figures, _rate, judged)


def narrow(bench: Bench) -> Iterator[Line]:
    """Rows of 16 float32 columns."""
    systems = {"ours": "ours", "petastorm": "petastorm", "raw gather": "raw_gather"}
    lines = [("ours", "petastorm", None), ("ours", "raw gather", 0.95)]
    yield from _loaders(bench, "narrow", "narrow", systems, lines)


def vec(bench: Bench) -> Iterator[Line]:
    """Vectors of 784 float32."""
    systems = {
        "ours": "ours",
        "petastorm": "petastorm",
        "torch DataLoader": "torch_loader",
        "raw gather": "raw_gather",
    }
    lines = [
        ("ours", "petastorm", None),
        ("ours", "torch DataLoader", 6.0),
        ("ours", "raw gather", 0.95),
    ]
    yield from _loaders(bench, "vec784", "vec", systems, lines)


def jpeg(bench: Bench) -> Iterator[Line]:
    """Images of 64 x 64."""
    row = "JPEG"
    systems = {
        "ours": "ours",
        "ours, cached": "ours_cached",
        "petastorm, OpenCV": "petastorm",
        "petastorm, Pillow": "petastorm_pillow",
        "petastorm, its codec": "petastorm_codec",
        "the decoder": "decoder",
        "the decoder, into batches": "decoder_batches",
    }
    yield from _loaders(bench, row, "jpeg", systems, [("ours, cached", "petastorm, Pillow", 40.0)])

    def per_core(name: str) -> float | None:
        rate, cores = bench.figure(row, name), bench.figure(row, name, "cores")
        return None if rate is None or cores is None else rate / cores

    # The target was set against Pillow; OpenCV is the fastest way through Petastorm.
    peers = {
        "the decoder, into batches": (">=", 0.9),
        "the decoder": None,
        "petastorm, Pillow": (">=", 5.0),
        "petastorm, OpenCV": None,
        "petastorm, its codec": None,
    }
    for peer, target in peers.items():
        title = f"{row}, per core: ours / {peer}"
        yield _compared(title, per_core("ours"), per_core(peer), _rate, target)


def first(bench: Bench) -> Iterator[Line]:
    """First epochs, with packing."""
    systems = {"ours": "ours_first", "by hand": "raw_first", "pyarrow scan": "scan"}
    lines = [("ours", "by hand", 0.95), ("ours", "pyarrow scan", None)]
    for row, kind in (("first epoch, narrow", "narrow"), ("first epoch, vec784", "vec")):
        yield from _loaders(bench, row, kind, systems, lines)


def tf(bench: Bench) -> Iterator[Line]:
    """``tf.data`` datasets, in a Python loop and in a graph."""
    systems = {
        "ours": "ours_tf",
        "petastorm": "petastorm_tf",
        "tf.gather": "gather_tf",
        "no data": "no_data_tf",
    }
    for row, kind in (("tf.data, narrow", "narrow"), ("tf.data, vec784", "vec")):
        for key, how in (("rate", "Python"), ("graph", "graph")):
            targets = {"petastorm": None, "tf.gather": 1.0, "no data": None}
            lines = [("ours", peer, target) for peer, target in targets.items()]
            title = f"{row}, {how}"
            yield from _loaders(bench, row, kind, systems, lines, key=key, title=title)


def frame(bench: Bench) -> Iterator[Line]:
    """Time from a DataFrame to the first batch on all ranks."""
    row = "first batch of a DataFrame"
    bench.once(row, "frame", bench.task("narrow", rows=_FRAME_ROWS), {})
    names = ("ours", "files", "rows", "dropped", "empty run", "imports", "empty barrier job")
    seconds = {name: bench.figure(row, "frame", name) for name in names}
    peers = (
        ("write.parquet and read", "files", "empty run", 0.65),
        ("pickled rows", "rows", "empty barrier job", None),
    )
    for title, peer, _, target in peers:
        both = seconds["ours"], seconds[peer]
        judged = None if target is None else ("<=", target)
        yield _compared(f"{row}: ours / {title}", *both, _unit("s"), judged)
    for title, peer, empty, _ in peers:
        both = _above(seconds["ours"], seconds["empty run"]), _above(seconds[peer], seconds[empty])
        yield _compared(f"the same above an {empty}: ours / {title}", *both, _unit("s"), None)
    # Rows must reach Python once, and ranks that import what reads them must start.
    dropped, imports = seconds["dropped"], seconds["imports"]
    least = None if dropped is None or imports is None else dropped + imports
    title = "mapInArrow that keeps nothing, then a run that imports"
    yield _compared(f"{row}: ours / {title}", seconds["ours"], least, _unit("s"), ("<=", 1.3))


def _above(seconds: float | None, floor: float | None) -> float | None:
    return None if seconds is None or floor is None else seconds - floor


def memory(bench: Bench) -> Iterator[Line]:
    """Anonymous memory of the feed, above that before the feed was made."""
    for times in (1, 10):
        row = f"anonymous memory, {times}x"
        task = bench.task("narrow", times)
        with bench.packed() as variables:
            for name in ("pack", "packed_epoch", "scan_memory"):
                bench.once(row, name, task, variables)
        epoch, *packing = (
            bench.figure(row, name, "megabytes") for name in ("packed_epoch", "pack", "scan_memory")
        )
        yield _limited(f"{row}: a packed epoch", epoch, "MB", 32 if times == 10 else None)
        yield _compared(f"{row}: packing / pyarrow scan", *packing, _unit("MB"), None)


def plan(bench: Bench) -> Iterator[Line]:
    """Time to plan an epoch and to seek in it."""
    row = "10^8 rows"
    bench.take_turns(row, {"plan": ("plan", Task("", "", 0))})
    for size in (1, 4):
        for place in ("start", "middle"):
            value = bench.figure(row, "plan", f"{place}, {size}")
            title = f"{row}, np={size}: to the first batches from the {place}"
            yield _limited(title, value, "ms", 50)


def large(bench: Bench, gigabytes: float) -> Iterator[Line]:
    """A dataset of many gigabytes."""
    row = "large"
    rows = int(gigabytes * 1e9) // _NARROW_BYTES
    needed, free = 2.2 * gigabytes * 1e9, shutil.disk_usage(bench.folder).free
    if free < needed:
        sys.exit(f"{needed / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free")
    bench.take_turns(row, {"small": ("ours", bench.task("narrow"))})
    task = Task("narrow", str(bench.folder / "large"), rows, large=True)
    try:
        with bench.packed() as variables:
            for name in ("make", "pack", "sequential", "packed_epoch"):
                bench.once(row, name, task, variables)
    finally:
        shutil.rmtree(task.folder, ignore_errors=True)
    epoch = bench.figure(row, "packed_epoch")
    again = bench.figure(row, "packed_epoch", "rate again")
    title = f"{row}, {gigabytes:g} GB"
    yield Line(f"{title}: packing", _rate(bench.figure(row, "pack")), "-", ["-", "-", ""])
    small = bench.figure(row, "small")
    yield _compared(f"{title}: shuffled epoch / small case", again, small, _rate, (">=", 0.5))
    title_cold = f"{title}, nothing in the page cache: shuffled epoch"
    yield _compared(f"{title_cold} / small case", epoch, small, _rate, None)
    disk = bench.figure(row, "sequential")
    yield _compared(f"{title_cold} / sequential read", epoch, disk, _rate, None)
    for name, what, limit in (("pack", "packing", None), ("packed_epoch", "epoch", 32)):
        value = bench.figure(row, name, "megabytes")
        yield _limited(f"{title}: anonymous memory, {what}", value, "MB", limit)


def end_to_end(bench: Bench) -> Iterator[Line]:
    """Time from a DataFrame to a trained model."""
    row = "end to end"
    task = bench.task("narrow", rows=_FRAME_ROWS)
    bench.once(row, "end_to_end", task, {})
    names = ("ours", "floor, Horovod", "floor, DDP")
    peers = ("TorchDistributor", "TorchDistributor, BatchedDataLoader")
    seconds = {name: bench.figure(row, "end_to_end", name) for name in (*names, *peers)}
    own = _above(seconds["ours"], seconds["floor, Horovod"])
    show = _unit("s")
    for peer, target in zip(peers, (("<=", 0.2), None), strict=True):
        yield _compared(f"{row}: ours / {peer}", seconds["ours"], seconds[peer], show, None)
        other = _above(seconds[peer], seconds["floor, DDP"])
        yield _compared(f"{row}, above the floor: ours / {peer}", own, other, show, target)
    floors = seconds["floor, Horovod"], seconds["floor, DDP"]
    yield _compared(f"{row}, the floors: Horovod / DDP", *floors, show, None)
    bench.once("TorchEstimator", "estimator", task, {})
    taken = bench.figure("TorchEstimator", "estimator", "seconds")
    title = f"{row}: ours / TorchEstimator of horovod.spark"
    yield _compared(title, seconds["ours"], taken, show, None)


def scored(bench: Bench) -> Iterator[Line]:
    """Time from a DataFrame to all its rows with a trained model's predictions."""
    row = "scored"
    bench.once(row, "scored", bench.task("narrow", rows=_FRAME_ROWS), {})
    ours, peer = (bench.figure(row, "scored", name) for name in ("ours", "peer"))
    title = f"{row}: ours / TorchDistributor, converter and predict_batch_udf"
    yield _compared(title, ours, peer, _unit("s"), None)


GROUPS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "narrow": narrow,
    "vec": vec,
    "jpeg": jpeg,
    "first": first,
    "tf": tf,
    "frame": frame,
    "memory": memory,
    "plan": plan,
    "end-to-end": end_to_end,
    "scored": scored,
}


def _child(name: str, task: str, result: str) -> None:
    data_loaders.quiet()
    found = _MEASURES[name](Task(*json.loads(task)))
    Path(result).write_text(json.dumps(found if isinstance(found, list) else [found]))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Loaders, and ways from a DataFrame to ranks.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument(
        "--rows", nargs="+", choices=[*GROUPS, "large"], default=list(GROUPS), help="default: all"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the datasets' sizes")
    parser.add_argument("--large-gb", type=float, default=20.0, help="size for the row large")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*options.child)
        return
    groups: dict[str, Callable[[Bench], Iterator[Line]]] = {
        **GROUPS,
        "large": partial(large, gigabytes=options.large_gb),
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.rounds, options.scale)
        lines: list[Line] = []
        for name in options.rows:
            try:
                lines += groups[name](bench)
            except FailedError as error:  # its data could not be made
                bench.notes.append(f"{name}: {error}")
            if options.json:
                raw = {"rows": bench.raw, "table": lines, "scale": options.scale}
                report.write_json(options.json, {**raw, "notes": bench.notes})
    packages = ("petastorm", "pyarrow", "numpy", "tensorflow", "tensorflow-cpu", "simplejpeg")
    print(f"\n{report.machine(*packages)}; medians of {options.rounds}\n")
    heads = ["", "ours", "peer", "ratio", "target", ""]
    print(report.table(heads, [[*line[:3], *line.cells] for line in lines]))
    for note in bench.notes:
        print(f"\n{note}")


if __name__ == "__main__":
    main()
