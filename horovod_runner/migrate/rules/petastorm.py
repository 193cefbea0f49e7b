"""Petastorm's converters, which a DataFrame among the arguments of `run` replaces."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, argument, is_value, keywords
from horovod_runner.migrate.edits import Edit, Finding
from horovod_runner.migrate.rules.launch import RUNNERS, function_of
from horovod_runner.migrate.rules.training import first_statement

_MAKE = ("petastorm.spark.make_spark_converter",)
_LOADERS = {"make_torch_dataloader": "to_torch", "make_tf_dataset": "to_tf"}
_READERS = ("petastorm.make_reader", "petastorm.make_batch_reader")
# Arguments without a counterpart that are not needed.
_NOT_NEEDED = frozenset(
    {"workers_count", "reader_pool_type", "shuffling_queue_capacity", "prefetch"}
)
_KNOWN = _NOT_NEEDED | {
    *("batch_size", "num_epochs", "cur_shard", "shard_count", "shuffle_row_groups"),
}
_WHY = (
    "A DataFrame among the arguments of run replaces the converter: it arrives as a Shard, this "
    "rank's part, and all ranks have the same number of batches"
)


def converters(code: Code) -> Iterator[Finding]:
    """`make_spark_converter`, where what a run's function does with it is known."""
    functions: dict[cst.FunctionDef, list[cst.Call]] = {}
    for run in _runs(code):
        function = function_of(code, run.args[0].value)
        if function is not None:
            functions.setdefault(function, []).append(run)
    for make in code.calls_of(*_MAKE):
        name, frame = code.assigned(make), argument(make, "df", 0)
        if name is not None and frame is not None:
            for function, runs in functions.items():
                yield from _one(code, function, runs, name.value, code.source(frame.value))


def _runs(code: Code) -> Iterator[cst.Call]:
    """The calls of `HorovodRunner(...).run`."""
    for call in code.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("run", "run_all"):
            owners = [call.func.value, *code.values(call.func.value)]
            makers = [owner.func for owner in owners if isinstance(owner, cst.Call)]
            if call.args and any(code.names(maker).intersection(RUNNERS) for maker in makers):
                yield call


def _one(
    code: Code, function: cst.FunctionDef, runs: list[cst.Call], converter: str, frame: str
) -> Iterator[Finding]:
    """The finding for a converter that the function of some runs uses."""
    passed = [arg for run in runs for arg in run.args if code.source(arg.value) == converter]
    names = {arg.keyword.value if arg.keyword is not None else "" for arg in passed}
    if len(names) > 1 or "" in names or (passed and len(passed) != len(runs)):
        return
    local = names.pop() if names else converter
    parameters = {param.name.value for param in function.params.params}
    uses = list(code.uses(local, function.body))
    if not uses or (not passed and local in parameters):
        return
    direct = [call for call in code.calls if function_of(code, call.func) is function]
    if direct:
        yield code.finding(
            uses[0], f"{_WHY}. By hand: {function.name.value} is also called directly"
        )
        return
    edits: list[Edit] = []
    for use in uses:
        found = _use(code, use)
        if isinstance(found, str):
            yield code.finding(use, f"{_WHY}. {found}")
            return
        edits += found
    edits += [code.replace(arg.value, frame) for arg in passed]
    if not passed:
        edits.append(_parameter(code, function, local))
        edits += [_argument(code, run, f"{local}={frame}") for run in runs]
    new = "".join(edit.new for edit in edits)
    missing = [
        f"import {module}"
        for module in ("contextlib", "itertools")
        if f"{module}." in new and f"import {module}" not in code.source(function)
    ]
    first = first_statement(function)
    if missing and first is not None:
        edits.append(code.before(first, *missing))
    yield code.finding(uses[0], _WHY, *edits)


def _argument(code: Code, run: cst.Call, text: str) -> Edit:
    """Give a run one more argument."""
    given = code.end(run.args[-1])
    return Edit(given, given, f", {text}")


def _parameter(code: Code, function: cst.FunctionDef, name: str) -> Edit:
    """Give a function one more parameter."""
    params = function.params
    last = [*params.params, *params.kwonly_params]
    star = isinstance(params.star_arg, cst.Param | cst.ParamStar)
    has_default = any(param.default is not None for param in params.params)
    text = name if star or not has_default else f"*, {name}"
    if last:
        param = last[-1]
        note = param.annotation
        end = code.outer_end(param.default or (note.annotation if note else param.name))
        return Edit(end, end, f", {text}")
    begin = code.text.index("(", code.start(function.name)) + 1
    tail = ", " if params.star_kwarg is not None or star else ""
    return Edit(begin, begin, f"{text}{tail}")


def _use(code: Code, use: cst.Name) -> list[Edit] | str:
    """The edits for one use of a converter; or what has to be done by hand."""
    parent = code.parent(use)
    if isinstance(parent, cst.Arg):
        call = code.parent(parent)
        if isinstance(call, cst.Call) and code.source(call.func) == "len":
            return [code.replace(call, f"{use.value}.rows")]
        return f"By hand: {use.value} is passed on, to a function or a name"
    if isinstance(parent, cst.Attribute):
        call = code.parent(parent)
        if isinstance(call, cst.Call) and call.func is parent:
            if parent.attr.value in _LOADERS:
                return _loader(code, call, parent)
            return f"By hand: {use.value}.{parent.attr.value}"
    return f"By hand: {use.value}"


def _loader(code: Code, call: cst.Call, func: cst.Attribute) -> list[Edit] | str:
    """The edits for `converter.make_torch_dataloader(...)` or `make_tf_dataset`."""
    unknown = keywords(call) - _KNOWN
    if "transform_spec" in unknown:
        return (
            "By hand: transform_spec becomes transform=, a function of a dict of NumPy arrays "
            "(docs/howto/data.md, Petastorm)"
        )
    if unknown or any(arg.star for arg in call.args):
        return f"By hand: {', '.join(sorted(unknown)) or 'the arguments with a star'}"
    if argument(call, "cur_shard") is None:
        return (
            "By hand: without cur_shard every rank reads all rows, and from a Shard its part; "
            "average what you compute with hvd.allreduce"
        )
    size = argument(call, "batch_size", 0)
    order = argument(call, "shuffle_row_groups")
    shuffled = order is None or not is_value(order.value, "False")
    texts = [
        "32" if size is None else code.source(size.value),
        *(["shuffle=True"] if shuffled else []),
    ]
    owner = code.source(func.value)
    method = _LOADERS[func.attr.value]
    new = f"{owner}.{method}({', '.join(texts)})"
    epochs = argument(call, "num_epochs", 1)
    endless = epochs is None or is_value(epochs.value, "None")
    if not endless and epochs is not None and not is_value(epochs.value, "1"):
        return "By hand: num_epochs. Each loop over the batches is one epoch"
    item = code.parent(call)
    edits: list[Edit] = []
    if method == "to_tf":
        new += ".repeat()" if endless else ""
        found = _fields(code, item)
        if isinstance(found, str):
            return found
        edits += found
    elif endless:
        # Petastorm's loader never ends, and starts anew inside one loop.
        new = f"itertools.chain.from_iterable(itertools.repeat({new}))"
    if isinstance(item, cst.WithItem):
        new = f"contextlib.nullcontext({new})"
    return [*edits, code.replace(call, new)]


def _fields(code: Code, item: cst.CSTNode | None) -> list[Edit] | str:
    """In functions over the dataset's elements, `row.name` becomes `row["name"]`."""
    target = item.asname.name if isinstance(item, cst.WithItem) and item.asname else None
    with_block = None if item is None else code.parent(item)
    if not isinstance(target, cst.Name) or not isinstance(with_block, cst.With):
        return "By hand: batches are dicts"
    for loop in code.all(cst.For, with_block.body):
        if code.source(loop.iter) == target.value:
            return f"By hand: {target.value} has dicts"
    edits: list[Edit] = []
    for call in code.all(cst.Call, with_block.body):
        kind, dataset = _chain(call)
        if dataset != target.value:
            continue
        mapped = call.args[0].value if call.args else None
        if not isinstance(mapped, cst.Lambda) or len(mapped.params.params) != 1:
            return f"By hand: the elements of {target.value} are dicts, in its {kind} too"
        row = mapped.params.params[0].name.value
        for use in code.uses(row, mapped.body):
            field = code.parent(use)
            if not isinstance(field, cst.Attribute):
                return f"By hand: {row} is a dict"
            edits.append(code.replace(field, f'{row}["{field.attr.value}"]'))
        if kind == "map":
            break  # what comes after it has other elements
    return edits


def _chain(call: cst.Call) -> tuple[str, str]:
    """The method of `rows.shuffle(9).map(...)` and its dataset, if no other map is between them."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value not in ("map", "filter"):
        return "", ""
    inner = func.value
    while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
        if inner.func.attr.value == "map":
            return "", ""
        inner = inner.func.value
    return func.attr.value, inner.value if isinstance(inner, cst.Name) else ""


def others(code: Code) -> Iterator[Finding]:
    """Converters of a text with a run, which no run's function uses in a known way."""
    if any(True for _ in converters(code)) or not list(_runs(code)):
        return
    for make in code.calls_of(*_MAKE):
        if not _is_replaced(code, code.source(make.args[0].value) if make.args else ""):
            yield code.finding(
                make, f"{_WHY}. By hand: the function of run does not use it directly"
            )


def leftovers(code: Code) -> Iterator[Finding]:
    """Converters and imports of Petastorm that nothing uses any more."""
    for make in code.calls_of(*_MAKE):
        name, statement = code.assigned(make), code.statement(make)
        if name is None or statement is None:
            continue
        edits: list[Edit | None] = [code.remove(statement)]
        frame = code.source(make.args[0].value)
        for use in code.uses(name.value):
            if use is not name and not _is_parameter(code, use):
                edits.append(_leftover(code, use, frame))
        if None not in edits and _is_replaced(code, frame):
            yield code.finding(
                make,
                "Nothing is written to Parquet, so there is no converter to make and to delete",
                *(edit for edit in edits if edit is not None),
            )
    if not list(code.calls_of(*_MAKE)):
        yield from _unused(code)


def _is_replaced(code: Code, frame: str) -> bool:
    """Whether a run gets the DataFrame of a converter."""
    return any(
        arg.keyword is not None and code.source(arg.value) == frame
        for run in _runs(code)
        for arg in run.args
    )


def _is_parameter(code: Code, use: cst.Name) -> bool:
    """Whether a name is a parameter of a function, and no variable outside."""
    for outer in code.above(use):
        if isinstance(outer, cst.FunctionDef):
            params = (*outer.params.params, *outer.params.kwonly_params)
            if use.value in [param.name.value for param in params]:
                return True
    return False


def _leftover(code: Code, use: cst.Name, frame: str) -> Edit | None:
    """The edit for a use outside the ranks' function: `len(converter)`, `converter.delete()`."""
    parent = code.parent(use)
    if isinstance(parent, cst.Arg):
        call = code.parent(parent)
        if isinstance(call, cst.Call) and code.source(call.func) == "len":
            return code.replace(call, f"{frame}.count()")
    if isinstance(parent, cst.Attribute) and parent.attr.value == "delete":
        statement = code.statement(use)
        return None if statement is None else code.remove(statement)
    return None


def _unused(code: Code) -> Iterator[Finding]:
    """Imports of Petastorm's converter, and the setting of its cache."""
    edits: list[Edit | None] = []
    first = None
    imported = {"SparkDatasetConverter", "make_spark_converter"}
    for node in code.all(cst.ImportFrom):
        if isinstance(node.names, cst.ImportStar) or node.module is None:
            continue
        names = {alias.evaluated_name for alias in node.names}
        if code.source(node.module).startswith("petastorm.spark") and names <= imported:
            statement = code.statement(node)
            first = first or node
            edits.append(None if statement is None else code.remove(statement))
    for use in code.uses("SparkDatasetConverter"):
        if code.around(use, cst.ImportFrom) is None:
            statement = code.statement(use)
            setting = statement is not None and "PARENT_CACHE_DIR" in code.source(statement)
            edits.append(code.remove(statement) if setting and statement is not None else None)
    if first is not None and None not in edits:
        yield code.finding(
            first,
            "Nothing of Petastorm is used any more",
            *(edit for edit in edits if edit is not None),
        )


def readers(code: Code) -> Iterator[Finding]:
    """Petastorm's readers with a part for each rank."""
    for call in code.calls_of(*_READERS):
        if argument(call, "cur_shard") is not None:
            yield code.finding(
                call,
                "The shards of Petastorm differ in their number of batches, which makes ranks wait "
                "for each other forever. Pass horovod_runner.data.petastorm(url), or "
                "parquet(path), as an argument of run: it arrives as this rank's part",
            )
