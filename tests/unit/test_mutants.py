"""Mutants: patterns find code by its syntax tree, and those that do not apply are reported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.pattern import PatternError, replace
from tests.mutants.run import Mutant, examine, in_quick_suite, named

SOURCE = '''
LIMIT = 3

class Box:
    """A box."""

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    def add(self, item):
        if item in self.items:
            return False
        elif len(self.items) >= LIMIT:
            raise ValueError(f"{len(self.items)} items: {item!r} is too many")
        self.items.append(item)
        self.count += 1
        return True

    def watch(self):
        def add(item):
            print(item)
            return item and self.count
        return add

def add(one, other):
    return one + other
'''
IDS = [
    "tests/unit/test_a.py::test_fast",
    "tests/real/test_b.py::test_run[local]",
    "tests/real/test_b.py::test_run[spark]",
    "tests/real/test_b.py::test_runner",
]


def changed(old: str, *, by: str) -> str:
    """The sample where one text is replaced by another, as `ast.unparse` writes it."""
    assert SOURCE.count(old) == 1
    return ast.unparse(ast.parse(SOURCE.replace(old, by)))


def mutant(
    breaks: str, tests: tuple[str, ...], *, where: str = "box.py::add", old: str = "one + other"
) -> Mutant:
    return Mutant(breaks, where, old, "one", tests)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one file and a list of quick tests."""
    (tmp_path / "box.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "quick.txt").write_text("tests/real/test_b.py::test_run[local]\n")
    return tmp_path


def test_layout_comments_and_docstrings_play_no_role() -> None:
    old = "if f(a, b) or None: return [a, b]"
    text = '''
def g(a, b):
    """New docstring."""
    if (  # a reason
        f(
            a,  # the first
            b,
        )
        or (None)
    ):
        # another
        return [a,
                b]
'''
    assert "return [b, a]" in replace(text, "g", old, "return [b, a]")


@pytest.mark.parametrize(
    "old", ["one\n    + other", "(one\n+ other)", "\n    one + other  # why\n"]
)
def test_a_pattern_may_have_several_lines_and_comments(old: str) -> None:
    assert replace(SOURCE, "add", old, "one") == changed("one + other", by="one")


@pytest.mark.parametrize(
    ("name", "old", "by"),
    [
        ("add", "return one + other", "return other"),
        ("Box::add", "item in self.items", "self.items"),
        ("Box::watch::add", "print(item)", "pass"),
        ("Box::watch", "print(item)", "pass"),
        ("Box::size", "self._size = value", "self._size = 0"),
        ("Box::size", "return self._size", "return 0"),
        ("Box", "self.count += 1", "self.count = 1"),
        ("", "LIMIT = 3", "LIMIT = 4"),
    ],
)
def test_a_pattern_is_searched_in_a_function_a_class_or_the_module(
    name: str, old: str, by: str
) -> None:
    assert replace(SOURCE, name, old, by) == changed(old, by=by)


def test_consecutive_statements_are_replaced_by_others() -> None:
    old = "self.items.append(item)\nself.count += 1"
    text = replace(SOURCE, "Box::add", old, "self.count += 2\nself.log()\nself.items.append(item)")
    by = "self.count += 2\n        self.log()\n        self.items.append(item)"
    assert text == changed("self.items.append(item)\n        self.count += 1", by=by)


def test_an_empty_unpacking_deletes_an_element() -> None:
    text = replace('A = {"x", "y", "z"}', "", '"y"', "*()")
    assert eval(text.removeprefix("A = ")) == {"x", "z"}


def test_an_elif_is_an_if() -> None:
    text = "if a:\n    f()\nelif b:\n    g()\n"
    assert replace(text, "", "if b:\n    g()", "h()") == "if a:\n    f()\nelse:\n    h()"


def test_an_expression_in_an_f_string_is_found() -> None:
    text = replace('def f(a):\n    return f"{len(a)} of {a!r:>{width}}"\n', "f", "len(a)", "a[0]")
    assert eval("f" + text.partition("return f")[2], {"a": [7], "width": 5}) == "7 of   [7]"


def test_an_operand_gets_the_parentheses_that_it_needs() -> None:
    text = replace(SOURCE, "Box::watch", "self.count", "self.count or 1")
    assert "return item and (self.count or 1)" in text


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("Box::add", "self.items", "[]", "`old` .* 4 times"),
        ("Box::add", "self.elements", "[]", "`old` .* 0 times"),
        ("Box::add", "self.items.append(item)\nreturn True", "pass", "`old` .* 0 times"),  # apart
        ("add", "print(item)", "pass", "`old` .* 0 times"),  # in another function of that name
        ("Box::remove", "self.items", "[]", "Box::remove"),
        ("add", "one + other", "(one+other)", "changes nothing"),
        ("", "LIMIT = 3", "return", "'return' outside function"),
        ("add", "one +", "one", r"Python: 'one \+'"),
        ("add", "one + other", "", "Python: ''"),
        ("add", "# a comment", "one", "Python: '# a comment'"),
    ],
)
def test_a_pattern_that_does_not_apply_says_why(
    name: str, old: str, new: str, problem: str
) -> None:
    with pytest.raises(PatternError, match=problem):
        replace(SOURCE, name, old, new)


def test_mutants_that_do_not_apply_are_reported_and_the_others_are_kept(tree: Path) -> None:
    tests = ("tests/unit/test_a.py",)
    good, problems = examine(
        [
            mutant("Gone.", tests, old="one - other"),
            mutant("Moved.", tests, where="crate.py::add"),
            mutant("Fits.", tests),
        ],
        tree,
        IDS,
    )
    assert [each.breaks for each in good] == ["Fits."]
    assert problems == [
        "does not apply: Gone. `old` occurs 0 times (box.py::add)",
        "does not apply: Moved. there is no such file (crate.py::add)",
    ]


def test_tests_that_do_not_exist_are_reported_and_left_out(tree: Path) -> None:
    there, gone = "tests/real/test_b.py::test_run[spark]", "tests/real/test_b.py::test_run[slurm]"
    good, problems = examine([mutant("M.", (gone, there)), mutant("N.", ())], tree, IDS)
    assert [each.tests for each in good] == [(there,)]
    assert problems == [f"no such test: M. {gone}", "no such test: N. none"]


def test_an_entry_names_a_file_a_test_or_one_of_its_parameters() -> None:
    assert named("tests/real", IDS) == named("tests/real/test_b.py", IDS) == IDS[1:]
    assert named("tests/real/test_b.py::test_run", IDS) == IDS[1:3]
    assert named(IDS[1], IDS) == [IDS[1]]


def test_a_mutant_without_a_quick_test_is_named_and_not_tried(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, spark = "tests/real/test_b.py", "tests/real/test_b.py::test_run[spark]"
    tried = in_quick_suite(
        [
            mutant("Unit.", (spark, "tests/unit/test_a.py")),
            mutant("Whole.", (whole,)),
            mutant("Slow.", (spark,)),
        ],
        IDS,
        tree,
    )
    assert [each.tests for each in tried] == [("tests/unit/test_a.py",), (whole,)]
    assert capsys.readouterr().out == "only test-all: Slow.\n"
