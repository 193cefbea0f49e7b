"""Run the tests that run the lines in which two checkouts differ: near ones, and cheap ones, first.

    python -m tests.mutation.covering CHECKOUT LINES SECONDS

CHECKOUT is the one without the change, LINES the folder of `make coverage`. Tests that took longer
than SECONDS there, together, are left out. The exit status is 0 if all tests pass.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.choose import Test, read

PACKAGE = "horovod_runner"
#: A test that takes more does more than to look at what another test has run.
OWN_SECONDS = 1.0


def changed_lines(here: Path, there: Path) -> set[tuple[str, int]]:
    """The lines of a checkout, without its change, that another one has not."""
    found = set()
    for path in sorted((here / PACKAGE).rglob("*.py")):
        name = path.relative_to(here / PACKAGE)
        old, new = (there / PACKAGE / name).read_text(), path.read_text()
        if old == new:
            continue
        matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
        for kind, begin, end, _, _ in matcher.get_opcodes():
            if kind != "equal":
                found |= {(str(name), line + 1) for line in range(begin, max(end, begin + 1))}
    return found


def with_functions(there: Path, changed: set[tuple[str, int]]) -> Iterator[set[tuple[str, int]]]:
    """The changed lines; then those of the functions around them, the innermost first.

    TensorFlow rewrites the function of a graph, so the lines in the file itself never run.
    """
    yield changed
    ((file, line), *_) = changed
    functions = [
        node
        for node in ast.walk(ast.parse((there / PACKAGE / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    for node in sorted(functions, key=lambda node: -node.lineno):
        yield {(file, each) for each in range(node.lineno, (node.end_lineno or 0) + 1)}


def shared_fixtures(path: Path) -> dict[str, set[str]]:
    """Of each test function of a file the fixtures that it shares with others of the file."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    shared = {
        node.name
        for node in functions
        if any("scope='module'" in ast.unparse(each) for each in node.decorator_list)
    }
    return {node.name: shared & {each.arg for each in node.args.args} for node in functions}


def with_sharers(covering: Iterable[Test], known: Iterable[Test]) -> Iterator[Test]:
    """The cheapest first; after each those that look at the run that its fixture has made.

    Only the first test that asks for a fixture has the lines of that run.
    """
    fixtures: dict[str, dict[str, set[str]]] = {}
    left = {test.name: test for test in known}

    def shared(test: Test) -> set[str]:
        file, _, name = test.name.partition("::")
        if file not in fixtures:
            fixtures[file] = shared_fixtures(Path(file)) if name else {}
        return fixtures[file].get(name.partition("[")[0], set())

    for test in sorted(covering, key=lambda test: test.seconds):
        if left.pop(test.name, None) is None:
            continue
        yield test
        if asked := shared(test):
            file = test.name.partition("::")[0]
            for other in [*left.values()]:
                is_near = other.name.startswith(f"{file}::") and other.seconds < OWN_SECONDS
                if is_near and asked & shared(other):
                    yield left.pop(other.name)


def importing(file: str, tests: Path) -> set[str]:
    """The test files, below a folder, that import a module of the package themselves."""
    module = f"{PACKAGE}/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    room, _, name = module.rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(room)} import .*\b{name}\b")
    return {str(path) for path in tests.rglob("test_*.py") if imports.search(path.read_text())}


def main() -> int:
    """Run them; returns pytest's exit status, or 0 if no test runs the lines."""
    original, recorded = map(Path, sys.argv[1:3])
    most = float(sys.argv[3])
    changed = changed_lines(Path.cwd(), original)
    known = read(recorded, {file for file, _ in changed})
    covering: list[Test] = []
    functions = [*with_functions(original, changed)]
    for lines in functions:
        covering = covering or [test for test in known.values() if test.lines & lines]
    near = importing(next(iter(changed))[0], Path("tests/unit"))
    ordered = [*with_sharers(covering, known.values())]
    ordered.sort(key=lambda test: test.name not in near)
    if len(functions) == 1:  # it runs with the import, which only the first test that does it has
        missing = near - {test.name for test in ordered}
        ordered[:0] = [test for test in known.values() if test.name in missing]
    chosen, seconds = [], 0.0
    for test in ordered:
        seconds += test.seconds
        if seconds > most and chosen:
            break
        chosen.append(test.name)
    if not chosen:
        print("no test runs these lines")
        return 0
    options = ["-x", "-q", "-p", "no:cacheprovider", "--places", "all"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
