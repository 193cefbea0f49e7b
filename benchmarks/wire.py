"""Reductions and training steps between hosts, compared with what their links carry.

Two and four hosts (network namespaces) with links of 1 and 10 Gbit/s, with and without a latency of
1 ms. Reference: several plain TCP connections over the same links, measured before and after in the
same processes. In an allreduce 2 (n-1)/n of the tensor's bytes have to leave each of n hosts.

    python benchmarks/wire.py [--turns 3] [--seconds 0.5] [--only 1 1+1ms] [--json wire.json]

`--peer PYTHON` also measures an environment with another build of Horovod. Requires root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import report
import wire_hosts
import wire_work
from wire_hosts import Link

LINKS = {
    "1": Link(1e9, 0),
    "1+1ms": Link(1e9, 1),
    "10": Link(10e9, 0),
    "10+1ms": Link(10e9, 1),
}
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20}
SIZES |= {"100 MB": 100_000_000, "256 MB": 256 << 20}
FEW = {name: SIZES[name] for name in ("4 KB", "1 MB", "100 MB")}
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
    **{
        f"powersgd(matrix_rank={rank})": ("powersgd", {"matrix_rank": rank})
        for rank in (1, 2, 4, 8)
    },
}
_LARGE, _SMALL = "100 MB", "4 KB"


class Shape(NamedTuple):
    """Hosts, and the ranks on each."""

    hosts: int
    local_size: int

    def __str__(self) -> str:
        ranks = "a rank" if self.local_size == 1 else f"{self.local_size} ranks"
        return f"{self.hosts} hosts with {ranks} each"


SHAPES = (Shape(2, 1), Shape(2, 2), Shape(4, 1))


def job(settings: dict[str, Any]) -> Any:
    """Run one measurement from the first host; wire_hosts.run calls it."""
    from horovod_runner import ClusterConfig, HorovodRunner

    cluster = ClusterConfig(launcher="slurm", cpu_collectives=settings["collectives"])
    runner = HorovodRunner(
        np=settings["np"],
        progress=False,
        env={**wire_hosts.NO_SHORT_CUTS, **settings["env"]},
        cluster_config=cluster,
    )
    return runner.run(wire_work.measure, **settings["work"])


def measure(
    link: Link, shape: Shape, options: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Start hosts, and measure Horovod over MPI and over Gloo on them; the results by system."""
    sizes = SIZES if shape == SHAPES[0] else FEW
    found = {}
    with wire_hosts.connected(folder, shape.hosts, link) as hosts:
        for system in ("mpi", "gloo", *(["peer"] if options.peer else [])):
            collectives = "mpi" if system == "peer" else system
            work = {
                "sizes": sizes,
                "turns": options.turns,
                "seconds": options.seconds,
                "peers": system == "mpi",
                "steps": system == "mpi" and shape == SHAPES[0],
            }
            settings = {"collectives": collectives, "np": shape.hosts * shape.local_size}
            settings |= {"work": work, "env": dict(options.env)}
            python = options.peer if system == "peer" else sys.executable
            found[system] = wire_hosts.run(
                folder, hosts, shape.local_size, [python, __file__], settings
            )
    return found


def rows_of(shape: Shape, found: dict[str, Any], title: str) -> Iterator[list[str]]:
    """The table of one cluster, and its figures with a target."""
    links = [link for each in found.values() for link in each["links"]]
    rate = median(link["rate"] for link in links)
    # Two exchanges for each doubling of the hosts: one for the negotiation, and one for the sum.
    trips = math.ceil(math.log2(shape.hosts))
    round_trip = median(link["round_trip"] for link in links)
    for name in found["mpi"]["seconds"]:
        of = {system: median(each["seconds"][name]["ours"]) for system, each in found.items()}
        of["torch"] = median(found["mpi"]["seconds"][name]["torch"])
        crossing = 2 * (shape.hosts - 1) / shape.hosts * SIZES[name]
        sent = found["mpi"]["sent"][name] / crossing
        row = [name, *(f"{of[each] * 1e3:.2f}" if each in of else "-" for each in _SYSTEMS)]
        if name == _LARGE:
            what = f"share of the link, {title}, {_LARGE}"
            yield [*row, *report.at_least(what, crossing / rate / of["mpi"], 0.9), f"{sent:.3f}"]
            if shape.local_size > 1:
                report.at_most(f"bytes on the wire / needed, {title}", sent, 1.1)
        elif name == _SMALL and round_trip > 1e-3:
            what = f"time / needed round trips, {title}, {_SMALL}"
            yield [*row, *report.at_most(what, of["mpi"] / (trips * round_trip), 1.3), "-"]
        else:
            share = crossing / rate / of["mpi"]
            yield [*row, f"{share:.2f}", "-", "-", f"{sent:.2f}"]


_SYSTEMS = ("mpi", "gloo", "torch", "peer")


def tables(link: Link, shape: Shape, found: dict[str, Any]) -> None:
    """Print the tables of one cluster."""
    title = f"{link}, {shape}"
    links = [each for system in found.values() for each in system["links"]]
    rates = [each["rate"] * 8 / 1e9 for each in links]
    trips = [each["round_trip"] * 1e3 for each in links]
    print(f"\n## {title}\n")
    print(
        f"Plain TCP: {median(rates):.2f} Gbit/s ({min(rates):.2f} to {max(rates):.2f}) each way at "
        f"once; a round trip takes {median(trips):.2f} ms. "
        f"{median(each['busy'] for each in links):.0f}% of the cores were busy, and "
        f"{found['mpi']['busy'][_LARGE]:.0f}% during reductions of {_LARGE}.\n"
    )
    heads = ["milliseconds", "ours, MPI", "ours, Gloo", "torch", "peer", "ours / limit", "target"]
    print(report.table([*heads, "", "bytes / needed"], list(rows_of(shape, found, title))))
    steps = found["mpi"]["steps"]
    if steps:
        plain = median(steps["ours, none"])
        rows = [
            [
                way,
                f"{median(seconds) * 1e3:.1f}",
                f"{plain / median(seconds):.2f}",
                f"{found['mpi']['sent_by_steps'][way] / 1e6:.2f}",
            ]
            for way, seconds in steps.items()
        ]
        heads = ["step, 16.8 MB of gradients", "ms", "times as fast", "MB leave a host"]
        print(f"\n{report.table(heads, rows)}")


def accuracies(options: argparse.Namespace) -> dict[str, list[float]]:
    """What compression costs in accuracy: two local ranks, several seeds."""
    from horovod_runner import HorovodRunner

    found: dict[str, list[float]] = {title: [] for title in KINDS}
    for seed in range(options.seeds):
        runner = HorovodRunner(np=-2, progress=False)
        shares = runner.run(wire_work.accuracy, kinds=KINDS, epochs=6, seed=seed)
        for title, share in shares.items():
            found[title].append(share)
    plain = median(found["none"])
    print(f"\n## Accuracy after 6 epochs on digits, {options.seeds} seeds\n")
    rows = [
        [title, f"{median(each):.3f}", f"{min(each):.3f}", f"{max(each):.3f}"]
        for title, each in found.items()
    ]
    print(report.table(["compression", "median", "lowest", "highest"], rows))
    for title in ("fp16", "bf16", "powersgd(matrix_rank=4)"):
        report.at_least(f"accuracy, {title} - none", median(found[title]) - plain, -0.01)
    return found


def main() -> None:
    """Measure, print tables, and write the raw data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, roughly")
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings for accuracy")
    parser.add_argument("--only", nargs="*", choices=LINKS, default=list(LINKS))
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--peer", help="the Python of an environment with another Horovod")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=lambda text: tuple(text.split("=", 1)),
        help="NAME=VALUE for the ranks",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print("\n" + json.dumps(job(json.loads(options.job))))
        return
    if why := wire_hosts.obstacle(delays=any(LINKS[each].delay for each in options.only)):
        raise SystemExit(f"no hosts: {why}")
    print(report.machine())
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"TCP's congestion control: {control}. Load before the run: {os.getloadavg()[0]:.1f}")
    raw: dict[str, Any] = {}
    for name in options.only:
        for number in options.shapes:
            shape = SHAPES[number]
            with tempfile.TemporaryDirectory() as folder:
                found = measure(LINKS[name], shape, options, Path(folder))
            raw[f"{LINKS[name]}, {shape}"] = found
            tables(LINKS[name], shape, found)
            sys.stdout.flush()
    if options.seeds:
        raw["accuracy"] = accuracies(options)
    if options.json:
        report.write_json(options.json, {"clusters": raw})


if __name__ == "__main__":
    main()
