"""Programs that readers copy, on machines with GPUs: nothing in them is for CPUs alone."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- not run: this is the code before[^\n]*\n\n?)?( *)```python\n(.*?)^\1```$",
    re.M | re.S,
)
_MADE = {"arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "zeros"}
_FEEDS = {"to_torch", "to_torch_dataset"}
# A call with one of these names brings a model or a tensor to a rank's device, or leaves that to a
# library that does.
_MOVES = {"to", "cuda", "prepare", "fully_shard", "initialize", "Trainer", "fit"}


class Program(NamedTuple):
    where: str
    line: int  # of its page, where it begins
    code: str


def programs() -> Iterator[Program]:
    """Code blocks of pages and docstrings, notebooks, examples; without code before a migration."""
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        if page.parent.name == "notebooks":  # made of the notebooks below
            continue
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            if not block[0].startswith("<!--"):
                line = text.count("\n", 0, block.start(2))
                yield Program(str(page.relative_to(ROOT)), line, textwrap.dedent(block[2]))
    for notebook in sorted(ROOT.glob("notebooks/*.ipynb")):
        for cell in json.loads(notebook.read_text())["cells"]:
            code = "".join(cell["source"])
            if cell["cell_type"] == "code" and not code.startswith(("%", "!")):
                yield Program(notebook.name, 0, code)
    for example in sorted(ROOT.glob("examples/*.py")):
        yield Program(example.name, 0, example.read_text())
    for module in sorted(ROOT.glob("horovod_runner/**/*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for code in _literal_blocks(ast.get_docstring(node) or ""):
                    yield Program(
                        f"{module.relative_to(ROOT)}, {getattr(node, 'name', '')}", 0, code
                    )


def _literal_blocks(text: str) -> Iterator[str]:
    """What a docstring indents after an empty line, where it is Python."""
    for block in re.findall(r"\n\n((?:    +\S[^\n]*(?:\n\n?|$))+)", text):
        code = textwrap.dedent(block)
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        yield code


def mistakes(code: str) -> list[tuple[int, str]]:
    """The lines of a program, and what each would do wrong on a machine with GPUs."""
    tree = ast.parse(code)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"cuda:\d+", node.value):
                found.append((node.lineno, f"{node.value} is one rank's GPU"))
            elif node.value == "cpu" and not _is_chosen(node, parents):
                found.append((node.lineno, "the CPU, also where there is a GPU"))
        if isinstance(node, ast.Call):
            if any(_is_no_gpu(keyword) for keyword in node.keywords):
                found.append((node.lineno, "gpus_per_rank=0"))
            if _name(node) in ("set_device", "cuda") and node.args and _is_number(node.args[0]):
                found.append((node.lineno, "the first GPU on every rank"))
        if isinstance(node, ast.FunctionDef):
            found += _of_function(node)
    return sorted(set(found))


def _of_function(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """What a function does that trains with batches that come on the rank's device."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    feeds = [call for call in calls if _name(call) in _FEEDS and not _keyword(call, "device")]
    if not feeds or not any(_path(call).startswith(("torch.", "nn.", "hvd.")) for call in calls):
        return []
    found = []
    if not any(_name(call) in _MOVES for call in calls):
        found.append((feeds[0].lineno, "batches come on the GPU, and no model is moved there"))
    for call in calls:
        made = _path(call).removeprefix("torch.")
        if made in _MADE and not _keyword(call, "device") and _has_size(call):
            found.append((call.lineno, f"torch.{made} makes a tensor on the CPU beside batches"))
    return found


def _is_chosen(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether it stands where there is no GPU: in a conditional, or as the value before one."""
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.IfExp):
            return True
        if isinstance(parent, ast.Assign):
            body = getattr(parents[parent], "body", [])
            after = body[body.index(parent) + 1 :] if parent in body else []
            return (
                bool(after)
                and isinstance(after[0], ast.If)
                and "is_available" in ast.dump(after[0])
            )
        node = parent
    return False


def _is_no_gpu(keyword: ast.keyword) -> bool:
    return keyword.arg == "gpus_per_rank" and _is_number(keyword.value, 0)


def _is_number(node: ast.AST, number: int | None = None) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int) and (number is None or value == number)


def _name(call: ast.Call) -> str:
    return _path(call).rpartition(".")[2]


def _path(call: ast.Call) -> str:
    """As it is written, without what is called on the way: x.to, torch.zeros."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        return f"{owner.id}.{function.attr}" if isinstance(owner, ast.Name) else f".{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _keyword(call: ast.Call, name: str) -> bool:
    return any(keyword.arg == name for keyword in call.keywords)


def _has_size(call: ast.Call) -> bool:
    """A tensor with a size: CUDA takes a number from the CPU."""
    return bool(call.args) and not (isinstance(call.args[0], ast.Tuple) and not call.args[0].elts)


def test_programs_that_readers_copy_are_right_on_machines_with_gpus() -> None:
    found = [
        f"{program.where}:{program.line + line}: {what}"
        for program in programs()
        for line, what in mistakes(program.code)
    ]
    assert found == []


def test_programs_of_all_kinds_are_looked_at() -> None:
    kinds = {Path(program.where.partition(",")[0]).suffix for program in programs()}
    assert kinds == {".md", ".ipynb", ".py"}
    assert len(list(programs())) > 200


_TRAIN = """
def train(data):
    batches = data.to_torch(32, {"x": "a", "y": "b"}%s)
    model = torch.nn.Linear(2, 1)%s
    weights = torch.ones(2%s)
    for x, y in batches:
        mse_loss(model(x) * weights, y).backward()
"""
RIGHT = _TRAIN % ("", '.to("cuda" if torch.cuda.is_available() else "cpu")', ", device=x.device")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (_TRAIN % ("", "", ", device=x.device"), "no model is moved"),
        (_TRAIN % (', device="cpu"', "", ""), "the CPU, also where there is a GPU"),
        (_TRAIN % ("", ".to(device)", ""), "torch.ones makes a tensor on the CPU"),
        (_TRAIN % ("", '.to("cpu")', ", device=x.device"), "the CPU, also where"),
        (_TRAIN % ("", '.to("cuda:0")', ", device=x.device"), "one rank's GPU"),
        (_TRAIN % ("", ".cuda(0)", ", device=x.device"), "the first GPU on every rank"),
        ("torch.cuda.set_device(0)", "the first GPU on every rank"),
        ('device = torch.device("cpu")', "the CPU, also where"),
        ("HorovodRunner(np=2, gpus_per_rank=0).run(train)", "gpus_per_rank=0"),
    ],
)
def test_a_mistake_with_devices_is_found(code: str, expected: str) -> None:
    assert any(expected in what for _, what in mistakes(code)), mistakes(code)


@pytest.mark.parametrize(
    "code",
    [
        RIGHT,
        'device = torch.device("cpu")\nif torch.cuda.is_available():\n    device = "cuda"',
        "HorovodRunner(np=2, gpus_per_rank=1 if gpu else 0)",
    ],
)
def test_programs_that_choose_their_device_are_right(code: str) -> None:
    assert mistakes(code) == []
