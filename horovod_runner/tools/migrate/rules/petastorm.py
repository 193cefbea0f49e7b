"""Petastorm's converters, which a DataFrame among the arguments of `run` replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.launch import function_of, runs
from horovod_runner.tools.migrate.rules.rule import fix, rule
from horovod_runner.tools.migrate.rules.training import first_statement

_MAKE = m.Call(tree.named("petastorm.spark.make_spark_converter"))
_LOADERS = {"make_torch_dataloader": "to_torch", "make_tf_dataset": "to_tf"}
# The arguments of loaders that have a counterpart, or are not needed.
_KNOWN = frozenset(
    {
        *("batch_size", "num_epochs", "cur_shard", "shard_count", "shuffle_row_groups"),
        *("workers_count", "reader_pool_type", "shuffling_queue_capacity", "prefetch"),
    }
)
_WHY = (
    "A DataFrame among the arguments of run replaces the converter: it arrives as a Shard, this "
    "rank's part, and all ranks have the same number of batches"
)


class _ByHandError(Exception):
    """Something that no rule knows; the text says what to do."""


@rule
def _converters(code: Code) -> Iterator[OldCode]:
    """`make_spark_converter`, where what a run's function does with it is known."""
    functions: dict[cst.FunctionDef, list[cst.Call]] = {}
    for run in runs(code):
        if function := function_of(code, run.args[0].value):
            functions.setdefault(function, []).append(run)
    for make in code.found(_MAKE):
        name, frame = code.assigned(make), _frame(code, make)
        for function, calls in functions.items() if name and frame else ():
            yield from _one(code, function, calls, name, frame)


def _frame(code: Code, make: cst.Call) -> str:
    """The text of the DataFrame of a converter."""
    frame = tree.argument(make, "df", 0)
    return "" if frame is None else code.source(frame.value)


def _one(
    code: Code, function: cst.FunctionDef, calls: list[cst.Call], converter: str, frame: str
) -> Iterator[OldCode]:
    """The finding for a converter that the function of some runs uses."""
    passed = [arg for run in calls for arg in run.args if code.source(arg.value) == converter]
    names = {arg.keyword.value if arg.keyword is not None else "" for arg in passed}
    if len(names) > 1 or "" in names or (passed and len(passed) != len(calls)):
        return
    local = names.pop() if names else converter
    uses = list(code.uses(local, function.body))
    if not uses or (not passed and local in _parameters(function)):
        return
    if any(function_of(code, call.func) is function for call in code.all(cst.Call)):
        yield OldCode(uses[0], f"{_WHY}. By hand: {function.name.value} is also called directly")
        return
    changes: tree.Changes = {arg.value: tree.becomes(frame) for arg in passed}
    modules: set[str] = set()
    for use in uses:
        try:
            changes |= _use(code, use, modules)
        except _ByHandError as error:
            yield OldCode(use, f"{_WHY}. By hand: {error}")
            return
    if not passed:
        changes[function.params] = _with_parameter(local)
        changes |= {run: tree.with_argument(f"{local}={frame}") for run in calls}
    lines = [f"import {module}" for module in sorted(modules)]
    missing = [line for line in lines if line not in code.source(function)]
    first = first_statement(function)
    if missing and first is not None:
        changes[first] = tree.before(*missing)
    yield OldCode(uses[0], _WHY, changes)


def _parameters(function: cst.FunctionDef) -> list[str]:
    params = (*function.params.params, *function.params.kwonly_params)
    return [param.name.value for param in params]


def _with_parameter(name: str) -> tree.Change:
    def change(old: cst.Parameters) -> cst.Parameters:
        kind = "params"
        if old.star_arg != cst.MaybeSentinel.DEFAULT or any(each.default for each in old.params):
            kind = "kwonly_params"
        return old.with_changes(**{kind: [*getattr(old, kind), cst.Param(cst.Name(name))]})

    return change


def _use(code: Code, use: cst.Name, modules: set[str]) -> tree.Changes:
    """The changes for one use of a converter; adds the modules that they need."""
    parent = code.parent(use)
    call = code.parent(parent)
    if isinstance(parent, cst.Arg):
        if _is_len(call):
            return {call: tree.becomes(f"{use.value}.rows")}
        raise _ByHandError(f"{use.value} is passed on, to a function or a name")
    if isinstance(parent, cst.Attribute):
        if m.matches(parent, tree.method(*_LOADERS)) and isinstance(call, cst.Call):
            return _loader(code, call, f"{use.value}.{_LOADERS[parent.attr.value]}", modules)
        if isinstance(call, cst.Call) and call.func is parent:
            raise _ByHandError(f"{use.value}.{parent.attr.value}")
    raise _ByHandError(use.value)


def _is_len(node: cst.CSTNode) -> bool:
    return m.matches(node, m.Call(m.Name("len")))


def _loader(code: Code, call: cst.Call, function: str, modules: set[str]) -> tree.Changes:
    """The changes for `converter.make_torch_dataloader(...)` or `make_tf_dataset`."""
    unknown = sorted({*tree.keywords(call)} - _KNOWN)
    if "transform_spec" in unknown:
        raise _ByHandError(
            "transform_spec becomes transform=, a function of a dict of NumPy arrays "
            "(docs/howto/data.md, Petastorm)"
        )
    if unknown or any(arg.star for arg in call.args):
        raise _ByHandError(", ".join(unknown) or "the arguments with a star")
    if tree.argument(call, "cur_shard") is None:
        raise _ByHandError(
            "without cur_shard every rank reads all rows, and from a Shard its part; average what "
            "you compute with hvd.allreduce"
        )
    size, epochs = tree.argument(call, "batch_size", 0), tree.argument(call, "num_epochs", 1)
    in_order = tree.is_value(tree.argument(call, "shuffle_row_groups"), "False")
    rows = "32" if size is None else code.source(size.value)
    new = f"{function}({rows})" if in_order else f"{function}({rows}, shuffle=True)"
    endless = epochs is None or tree.is_value(epochs, "None")
    if not endless and not tree.is_value(epochs, "1"):
        raise _ByHandError("num_epochs. Each loop over the batches is one epoch")
    changes: tree.Changes = {}
    item = code.parent(call)
    if function.endswith("to_tf"):
        new += ".repeat()" if endless else ""
        changes = _fields(code, item)
    elif endless:
        # Petastorm's loader never ends, and starts anew inside one loop.
        new = f"itertools.chain.from_iterable(itertools.repeat({new}))"
        modules.add("itertools")
    if isinstance(item, cst.WithItem):
        new = f"contextlib.nullcontext({new})"
        modules.add("contextlib")
    return {**changes, call: tree.becomes(new)}


def _fields(code: Code, item: Any) -> tree.Changes:
    """In functions over the dataset's elements, `row.name` becomes `row["name"]`."""
    if not m.matches(item, m.WithItem(asname=m.AsName(m.Name()))):
        raise _ByHandError("batches are dicts")
    rows, body = item.asname.name.value, code.parent(item).body
    if any(code.source(loop.iter) == rows for loop in code.all(cst.For, body)):
        raise _ByHandError(f"{rows} has dicts")
    changes: tree.Changes = {}
    for call in code.all(cst.Call, body):
        kind = _method_over(call, rows)
        if not kind:
            continue
        mapped = call.args[0].value if call.args else None
        if not isinstance(mapped, cst.Lambda) or len(mapped.params.params) != 1:
            raise _ByHandError(f"the elements of {rows} are dicts, in its {kind} too")
        row = mapped.params.params[0].name.value
        for use in code.uses(row, mapped.body):
            field = code.parent(use)
            if not isinstance(field, cst.Attribute):
                raise _ByHandError(f"{row} is a dict")
            changes[field] = tree.becomes(f'{row}["{field.attr.value}"]')
        if kind == "map":
            break  # what comes after it has other elements
    return changes


def _method_over(call: cst.Call, rows: str) -> str:
    """The name of `map` or `filter` on these rows, without another map between; or ""."""
    func: Any = call.func
    inner: Any = call
    while m.matches(inner, m.Call(m.Attribute())):
        if inner is not call and inner.func.attr.value == "map":
            return ""
        inner = inner.func.value
    over = m.matches(inner, m.Name(rows)) and m.matches(func, tree.method("map", "filter"))
    return str(func.attr.value) if over else ""


@rule
def _others(code: Code) -> Iterator[OldCode]:
    """Converters of a text with a run, which no run's function uses in a known way."""
    if any(True for _ in _converters(code)) or not any(True for _ in runs(code)):
        return
    for make in code.found(_MAKE):
        if not _is_replaced(code, _frame(code, make)):
            yield OldCode(make, f"{_WHY}. By hand: the function of run does not use it directly")


def _is_replaced(code: Code, frame: str) -> bool:
    """Whether a run gets the DataFrame of a converter."""
    return any(
        arg.keyword is not None and code.source(arg.value) == frame
        for run in runs(code)
        for arg in run.args
    )


@rule
def _leftovers(code: Code) -> Iterator[OldCode]:
    """Converters that nothing uses any more: `len(converter)` and `converter.delete()` remain."""
    for make in code.found(_MAKE):
        name, frame = code.assigned(make), _frame(code, make)
        removed = [code.statement(make)]
        changes: tree.Changes = {}
        for use in code.uses(name) if name and _is_replaced(code, frame) else ():
            parent = code.parent(use)
            if isinstance(parent, cst.AssignTarget) or _is_parameter(code, use):
                continue
            if isinstance(parent, cst.Arg) and _is_len(code.parent(parent)):
                changes[code.parent(parent)] = tree.becomes(f"{frame}.count()")
            else:
                deletes = m.matches(parent, tree.method("delete"))
                removed.append(code.statement(use) if deletes else None)
        removals = code.removes(*removed)
        if name and _is_replaced(code, frame) and removals:
            yield OldCode(
                make,
                "Nothing is written to Parquet, so there is no converter to make and to delete",
                {**changes, **removals},
            )


def _is_parameter(code: Code, use: cst.Name) -> bool:
    """Whether a name is a parameter of a function, and no variable outside."""
    return any(
        isinstance(outer, cst.FunctionDef) and use.value in _parameters(outer)
        for outer in code.above(use)
    )


@rule
def _unused(code: Code) -> Iterator[OldCode]:
    """Imports of Petastorm's converter, and the setting of its cache."""
    imported = {"petastorm.spark.SparkDatasetConverter", "petastorm.spark.make_spark_converter"}
    nodes = [(node, {*tree.imports_of(node)}) for node in code.all(cst.ImportFrom)]
    imports = [node for node, names in nodes if names and names <= imported]
    removed = [code.statement(node) for node in imports]
    for use in code.uses("SparkDatasetConverter"):
        if not code.around(use, cst.ImportFrom):
            line = code.statement(use)
            setting = line is not None and "PARENT_CACHE_DIR" in code.source(line)
            removed.append(line if setting else None)
    removals = code.removes(*removed)
    if imports and removals and not any(True for _ in code.found(_MAKE)):
        yield OldCode(imports[0], "Nothing of Petastorm is used any more", removals)


fix(
    m.Call(tree.named("petastorm.make_reader", "petastorm.make_batch_reader")),
    "The shards of Petastorm differ in their number of batches, which makes ranks wait for each "
    "other forever. Pass horovod_runner.data.petastorm(url), or parquet(path), as an argument of "
    "run: it arrives as this rank's part",
    where=lambda _code, call: tree.argument(call, "cur_shard") is not None,
)
