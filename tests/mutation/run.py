"""Draw changes by a seed, make one after the other with cosmic-ray, and write the scores.

What was noticed since `make coverage` is not tried again, so the rest can be tried once more, with
more tests.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.commands.execute import execute
from cosmic_ray.config import ConfigDict
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkItem

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PACKAGE = "horovod_runner"
#: Seconds for the tests of one change. A change that hangs them is noticed, too.
SECONDS = 1200
LEAST = 4  # changes of a room, whatever its size
_TRIES = 20  # for each change: most that cosmic-ray offers change nothing that runs


@dataclass(frozen=True)
class Change:
    """One change: where, and the lines before and after."""

    spec: MutationSpec
    old: str
    new: str

    @property
    def file(self) -> str:
        """The changed file, within the package."""
        return str(self.spec.module_path).removeprefix(f"{PACKAGE}/")

    @property
    def place(self) -> tuple[str, str, str]:
        """What equivalent.toml knows it by: the file, and its lines before and after."""
        return self.file, self.old, self.new

    @property
    def room(self) -> str:
        """The room of the file; the package's name for files that are in none."""
        return self.file.partition("/")[0] if "/" in self.file else PACKAGE


def operators() -> Iterator[tuple[str, object]]:
    """cosmic-ray's operators, without those that need arguments."""
    for name in operator_names():
        if not get_operator(name).arguments():
            yield name, get_operator(name)()


def positions(path: Path) -> list[MutationSpec]:
    """All changes of a file."""
    tree = get_ast_from_path(path)
    found = []
    for name, operator in operators():
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        found += [
            MutationSpec(path, name, occurrence, start, end)
            for occurrence, (start, end) in enumerate(places)
        ]
    return found


class _Behaviour(ast.NodeTransformer):
    """Removes what does not run: annotations, docstrings, imports for types, numbers of settings.

    How long something may take, or how large it may be, is no behaviour that a test can see: no
    test measures time. These are numbers in constants at the top of a module.
    """

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for statement in node.body:
            named = isinstance(statement, ast.Assign | ast.AnnAssign)
            if named and isinstance(statement.value, ast.Constant | ast.UnaryOp | ast.BinOp):
                statement.value = None if isinstance(statement, ast.AnnAssign) else ast.Constant(0)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        # Whether an argument may be given by its place, and by its name, is for callers to come.
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.defaults = [*node.defaults, *filter(None, node.kw_defaults)]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        if any(getattr(each, "id", "") == "overload" for each in node.decorator_list):
            node.body = [ast.Pass()]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return ast.Pass()
        return self.generic_visit(node)


def behaviour(source: str) -> str:
    """What of a source runs, as text that can be compared."""
    return ast.dump(_Behaviour().visit(ast.parse(source)))


def read_change(spec: MutationSpec) -> Change | None:
    """The change of a spec; None if it changes nothing that runs, or makes no Python."""
    old = Path(spec.module_path).read_text()
    try:
        new = mutate_code(old, get_operator(spec.operator_name)(), spec.occurrence)
    except AttributeError:  # cosmic-ray knows no `except module.Error`
        return None
    try:
        if new is None or behaviour(old) == behaviour(new):
            return None
    except SyntaxError:
        return None
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))[2:]
    before, after = (
        " ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+"
    )
    return Change(spec, before, after)


def draw(seed: int, count: int, rooms: Sequence[str]) -> list[Change]:
    """Changes of all rooms, or of some: to each as many as its size earns, and `LEAST` at least."""
    files: dict[str, dict[Path, int]] = defaultdict(dict)  # by room, with their lines
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if "overlay" not in inside.parts:
            room = inside.parts[0] if len(inside.parts) > 1 else PACKAGE
            files[room][path] = len(path.read_text().splitlines())
    whole = sum(lines for room in files.values() for lines in room.values())
    return [
        change
        for room, lines in sorted(files.items())
        if not rooms or room in rooms
        for change in draw_from(
            lines, f"{seed} {room}", max(LEAST, round(count * sum(lines.values()) / whole))
        )
    ]


def draw_from(lines: Mapping[Path, int], seed: str, count: int) -> list[Change]:
    """Draw changes from files: a file by its lines, then one of its changes.

    The count is without those of them that change no behaviour.
    """
    chance, equal = random.Random(seed), equivalent()
    known: dict[Path, list[MutationSpec]] = {}
    found: dict[tuple[Path, str], Change] = {}
    for _ in range(_TRIES * count):
        (path,) = chance.choices(list(lines), list(lines.values()))
        if path not in known:
            known[path] = positions(path)
        if known[path] and (change := read_change(chance.choice(known[path]))):
            found.setdefault((path, change.new), change)
        if sum(each.place not in equal for each in found.values()) == count:
            break
    return list(found.values())


def copy_checkout(tree: Path, folder: Path) -> None:
    """Copy what git knows of a checkout, and link its environments."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = tree / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for environment in tree.glob(".venv*"):
        (folder / environment.name).symlink_to(environment)


def try_share(changes: Sequence[Change], folder: Path, test: str, session: Path) -> None:
    """Make changes in a copy of the checkout, one after the other."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    with use_db(str(session), WorkDB.Mode.create) as database:
        database.add_work_items(
            [WorkItem.single(str(number), change.spec) for number, change in enumerate(changes)]
        )
        settings = {"test-command": test, "timeout": SECONDS, "distributor": {"name": "local"}}
        execute(database, ConfigDict(settings))


def results(session: Path) -> dict[int, tuple[bool, str]]:
    """Of each change whether it was noticed, and the last line that the tests printed."""
    with use_db(str(session), WorkDB.Mode.open) as database:
        return {
            int(job): (result.is_killed, (result.output or "").strip().rpartition("\n")[2])
            for job, result in database.results
        }


def equivalent() -> set[tuple[str, str, str]]:
    """File, line before and line after of the changes that change no behaviour."""
    listed = tomllib.loads((FOLDER / "equivalent.toml").read_text())["change"]
    return {(each["file"], each["old"], each["new"]) for each in listed}


def scores(changes: Sequence[Change], noticed: Container[Change], title: str) -> str:
    """The page about a run: a row for each room, and the changes that no test noticed."""
    known = equivalent()
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    missed = []
    for change in changes:
        kind = "noticed" if change in noticed else "missed"
        if change.place in known:
            kind = "equivalent"
        for row in (change.room, "all"):
            rows[row][kind] += 1
        if kind == "missed":
            missed += [f"- `{change.file}`", f"  `{change.old}`", f"  `{change.new}`"]
    lines = ["# Which changes the tests notice", "", title, ""]
    lines += ["| room | changes | equivalent | noticed | |", "|---|---|---|---|---|"]
    for room, row in sorted(rows.items(), key=lambda item: (item[0] != "all", item[0])):
        counted = row["noticed"] + row["missed"]
        share = f"{row['noticed'] / counted:.0%}" if counted else ""
        lines.append(
            f"| {room} | {row.total()} | {row['equivalent']} | {row['noticed']} | {share} |"
        )
    return "\n".join([*lines, "", "Not noticed, each with the line before and after:", "", *missed])


def main() -> None:
    """Draw, try, and write scores.md."""
    parser = argparse.ArgumentParser(description="How many small changes do the tests notice?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--rooms", nargs="*", default=[], help="these alone; scores are printed")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--lines", type=Path, default=ROOT / ".lines", help="of `make coverage`")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="most of the tests of a change (default: 150)"
    )
    parser.add_argument("--list", action="store_true", help="only print what is drawn")
    options = parser.parse_args()
    os.chdir(ROOT)
    changes = draw(options.seed, options.count, options.rooms)
    if options.list:
        for change in changes:
            print(f"{change.file}\n    {change.old}\n    {change.new}")
        return
    lines, seconds = str(options.lines.resolve()), str(options.seconds)
    test = shlex.join([sys.executable, "-m", "tests.mutation.covering", str(ROOT), lines, seconds])
    known, memory = equivalent(), options.lines / "noticed.json"
    before = {tuple(each) for each in json.loads(memory.read_text())} if memory.exists() else set()
    noticed = [each for each in changes if each.place in before]
    tried = [each for each in changes if each.place not in known | before]
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        shares = []
        for at in range(options.jobs):
            folder, session = Path(name) / f"{at}", Path(name) / f"{at}.sqlite"
            copy_checkout(ROOT, folder)
            arguments = (tried[at :: options.jobs], folder, test, session)
            process = multiprocessing.get_context("spawn").Process(target=try_share, args=arguments)
            process.start()
            shares.append((process, session))
        for at, (process, session) in enumerate(shares):
            process.join()
            if process.exitcode:
                sys.exit(f"a share of the changes ended with {process.exitcode}")
            for number, (saw, line) in results(session).items():
                change = tried[at + number * options.jobs]
                noticed += [change] if saw else []
                print(f"{'noticed' if saw else 'MISSED':8} {change.file}: {change.new}  # {line}")
    memory.write_text(json.dumps([*before | {each.place for each in noticed}]))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    title = (
        f"`make mutation SEED={options.seed} COUNT={options.count}` at {commit}. What no test "
        f"noticed was tried last with {options.seconds:g} s of tests for a change."
    )
    page = scores(changes, noticed, title)
    print(page)
    if not options.rooms:
        (FOLDER / "scores.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
