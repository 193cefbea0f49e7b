"""Run all benchmarks and write their results on one page.

    python benchmarks/suite.py [--only launch collectives] [--quick] [--folder benchmarks/results]

It writes into the folder: for each benchmark its raw data (``launch.json``) and tables
(``launch.md``), then ``README.md`` with all figures that have a target, and plots. Results of
benchmarks that are not run again stay in the folder; each has its date.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import report
from report import Judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The benchmarks in their order, each with its arguments for --quick.
_QUICK: dict[str, list[str]] = {
    "launch": ["--rounds", "1"],
    "warm_start": ["--turns", "1"],
    "rendezvous": ["--sizes", "2,8"],
    "scale": ["--sizes", "50", "100", "--seconds", "2"],
    "collectives": ["--turns", "1"],
    "torch_backend": ["--turns", "1"],
    "scaling": ["--turns", "1"],
    "wire": ["--turns", "1", "--seconds", "0.1", "--only", "1", "--seeds", "1"],
    "data": ["--rounds", "1", "--scale", "0.05"],
    "predict": ["--rounds", "1", "--scale", "0.05"],
    "reports": ["--rounds", "1", "--seconds", "1"],
    "checkpoints": ["--rounds", "1", "--mb", "50", "--large-mb", "100"],
    "faults": ["--runs", "1"],
    "elastic": ["--turns", "1"],
    "faults_elastic": ["--runs", "1"],
    "keras_steps": ["--turns", "2"],
    "prepare_data": ["--turns", "1", "--megabytes", "100"],
    "profiling": ["--rounds", "1"],
    "diagnose": ["--only", "sleeps", "--plain", "1", "--steps", "100"],
    "failures": ["--causes", "raise", "--limit", "10"],
}
# What a benchmark compares with, where not every environment has it.
_NEEDS = {"data": "petastorm"}
_HERE = Path(__file__).parent


def has_peer(name: str) -> bool:
    """Whether a benchmark can run in this environment; says so if not."""
    needed = _NEEDS.get(name)
    if needed is None or find_spec(needed):
        return True
    print(f"== {name}: left out, {needed} is not installed here", file=sys.stderr, flush=True)
    return False


def run(name: str, folder: Path, arguments: list[str]) -> str:
    """Run one benchmark; returns why it failed, or an empty string."""
    print(f"== {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    raw, tables = folder / f"{name}.json", folder / f"{name}.md"
    raw.unlink(missing_ok=True)
    tables.unlink(missing_ok=True)
    command = [sys.executable, str(_HERE / f"{name}.py"), *arguments, "--json", str(raw)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raw.unlink(missing_ok=True)  # it may be incomplete
        return f"exit code {done.returncode}"
    tables.write_text(report.anonymous(f"# {name}.py\n\n{done.stdout.strip()}\n"))
    print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return ""


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The raw data in the folder, in the order of the benchmarks."""
    paths = {name: folder / f"{name}.json" for name in _QUICK}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def judged_in(data: dict[str, Any]) -> Iterator[Judged]:
    """The figures of one benchmark that have a target."""
    for each in data.get("judged", []):
        yield Judged(**each)


def page(found: dict[str, dict[str, Any]], failures: dict[str, str], quick: bool) -> str:
    """The text of README.md: all figures that have a target."""
    machines = dict.fromkeys(data["machine"] for data in found.values())
    parts = [
        "# Results",
        "Made by `python benchmarks/suite.py`. benchmarks/README.md explains each figure. Ratios "
        "compare two sides of the same run.",
        *(["**Made with `--quick`, a check that they run: do not quote it.**"] if quick else []),
        *(f"Machine: {machine}." for machine in machines),
        "![ratios](ratios.svg)",
    ]
    for name, data in found.items():
        rows = []
        for each in judged_in(data):
            sign = ">=" if each.larger else "<="
            value = report.rounded(each.value, each.target, _places(each.value))
            verdict = "met" if each.met else "NOT MET"
            unit = f" {each.unit}" if each.unit else ""
            rows.append([each.what, f"{value}{unit}", f"{sign} {each.target:,g}", verdict])
        parts.append(f"## {name}.py, {data['date']}")
        if rows:
            parts.append(report.table(["", "measured", "target", ""], rows))
        parts.append(f"Raw data: [{name}.json]({name}.json); tables: [{name}.md]({name}.md).")
        if name in _PLOTS:
            parts.append(f"![{name}]({name}.svg)")
    for name, why in failures.items():
        parts.append(f"## {name}.py\n\nNot measured: {why}")
    return "\n\n".join(parts) + "\n"


def _places(value: float) -> int:
    """Decimal places that show three digits."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def plot_ratios(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    """Draw how many times better each figure is than its peer, and its target."""
    rows = [
        (f"{name}: {each.what}", each)
        for name, data in found.items()
        for each in judged_in(data)
        if not each.unit and each.value > 0 and each.target > 0
    ][::-1]
    better = [each.value if each.larger else 1 / each.value for _, each in rows]
    targets = [each.target if each.larger else 1 / each.target for _, each in rows]
    colours = ["tab:blue" if each.met else "tab:red" for _, each in rows]
    axes.set_xscale("log")
    axes.barh(range(len(rows)), [each - 1 for each in better], left=1, color=colours)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.plot(targets, range(len(rows)), "kd", markersize=4, label="target")
    axes.set_yticks(range(len(rows)), [what for what, _ in rows], fontsize=7)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times better than the peer (inverse where smaller is better)")
    axes.set_ylim(-1, len(rows))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))


def plot_collectives(axes: Axes, data: dict[str, Any]) -> None:
    """Draw milliseconds by size."""
    bytes_of = {"KB": 1e3, "MB": 1e6}
    for controller, found in data["seconds"].items():
        sizes = [name for name in found if name != "step"]
        x = [float(name.split()[0]) * bytes_of[name.split()[1]] for name in sizes]
        own, peer = list(found[sizes[0]])
        for system in (own, peer):
            if system == peer and not controller.startswith("auto"):
                continue
            y = [median(found[name][system]) * 1e3 for name in sizes]
            title = f"ours, {controller.rpartition(': ')[2]}" if system == own else system
            axes.loglog(x, y, "o-", label=title)
    axes.set_xlabel("bytes")
    axes.set_ylabel("milliseconds of an allreduce, np = 2")
    axes.legend()


def plot_rendezvous(axes: Axes, data: dict[str, Any]) -> None:
    """Draw seconds by the number of ranks."""
    for store, by_size in data["seconds"].items():
        x = [int(size) for size in by_size]
        axes.loglog(x, [median(by_size[str(size)]) for size in x], "o-", label=store)
    axes.set_xlabel("ranks on one machine")
    axes.set_ylabel("seconds in hvd.init()")
    axes.legend()


def plot_scale(axes: Axes, data: dict[str, Any]) -> None:
    """Draw the load of a driver by the number of simulated ranks."""
    x = [each["size"] for each in data["sizes"]]
    for key, title in (
        ("meet", "seconds until all have their slots"),
        ("meet_cpu", "the driver's CPU seconds meanwhile"),
        ("fence", "seconds of MPI's fences"),
        ("cores", "cores at ten reports a second each"),
        ("named", "seconds until a failed rank is named"),
    ):
        axes.loglog(x, [each[key] for each in data["sizes"]], "o-", label=title)
    axes.set_xlabel("simulated ranks")
    axes.set_ylabel("seconds, or cores")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


_PLOTS = {"collectives": plot_collectives, "rendezvous": plot_rendezvous, "scale": plot_scale}


def draw(folder: Path, found: dict[str, dict[str, Any]]) -> None:
    """Draw all plots."""
    import matplotlib as mpl

    mpl.use("Agg")
    # The same data give the same file.
    mpl.rcParams["svg.hashsalt"] = "horovod_runner"
    from matplotlib import pyplot

    figures = {"ratios": found, **{name: found[name] for name in _PLOTS if name in found}}
    for name, data in figures.items():
        count = sum(len(each.get("judged", [])) for each in found.values())
        size = (9, 1 + 0.16 * count) if name == "ratios" else (7, 4)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        (plot_ratios if name == "ratios" else _PLOTS[name])(axes, data)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    """Run the benchmarks, draw and write the page; exit code 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description="All benchmarks.")
    parser.add_argument(
        "--only", nargs="*", choices=_QUICK, help="to run; without names, only draw"
    )
    parser.add_argument("--quick", action="store_true", help="only check that they run, in minutes")
    parser.add_argument("--folder", type=Path, default=_HERE / "results")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    failures = {}
    names = filter(has_peer, _QUICK) if options.only is None else options.only
    for name in names:
        why = run(name, options.folder, _QUICK[name] if options.quick else [])
        if why:
            failures[name] = why
    found = found_in(options.folder)
    draw(options.folder, found)
    (options.folder / "README.md").write_text(page(found, failures, options.quick))
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
