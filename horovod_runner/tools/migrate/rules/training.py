"""Steps of a Horovod training that are missing, or in the wrong place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode, Unit
from horovod_runner.tools.migrate.rules.imports import uses_keras_2
from horovod_runner.tools.migrate.rules.launch import function_of, runs
from horovod_runner.tools.migrate.rules.rule import rule

_KERAS = ("horovod.tensorflow.keras", "horovod.keras", "horovod_runner.keras")
HOROVOD = (*_KERAS, "horovod.torch", "horovod.tensorflow", "horovod.mxnet")
# Names of Horovod that work before hvd.init().
_BEFORE_INIT = frozenset(
    {
        *("init", "is_initialized", "Compression", "callbacks", "elastic", "Average", "Sum"),
        *("Adasum", "mpi_built", "gloo_built", "nccl_built", "ProcessSet"),
    }
)
_BROADCASTS = ("broadcast", "load_checkpoint", "BroadcastGlobalVariables", "elastic", "load_model")
# What trains a model, and the position of its callbacks.
_CALLBACKS = {"fit": 5, "fit_generator": 4}
_OPTIMIZERS = ("keras.optimizers.", "tensorflow.optimizers.", "torch.optim.")


def _mains(code: Code) -> list[cst.FunctionDef]:
    """The functions of the text that a runner calls as ranks."""
    calls = [*runs(code, by=("run", "run_all", "start"))]
    calls += code.found(m.Call(tree.named("horovod.spark.run"), [m.AtLeastN(n=1)]))
    found = [function_of(code, call.args[0].value) for call in calls]
    return list(dict.fromkeys(function for function in found if function is not None))


class _TrainingCode:
    """The function that a runner calls, or a whole script.

    Attributes:
        unit: the function, or the module.
        parts: with the functions of the text that it calls, directly or through others.
        calls: all calls in them.
        uses: names of Horovod's modules in them, such as ``size`` for ``hvd.size``.
    """

    def __init__(self, code: Code, unit: Unit) -> None:
        self.unit = unit
        self.parts = list[Unit]([unit])
        for part in self.parts if isinstance(unit, cst.FunctionDef) else ():
            for call in code.all(cst.Call, part):
                function = function_of(code, call.func)
                if function is not None and function not in self.parts:
                    self.parts.append(function)
        self.calls = [call for part in self.parts for call in code.all(cst.Call, part)]
        self.uses = [use for part in self.parts for use in _uses(code, part)]
        self.text = "".join(code.source(part) for part in self.parts)

    def wrapping(self, code: Code, what: str) -> list[cst.Call]:
        """The calls of something of Horovod's with such a name."""
        return [call for call in self.calls if what in code.name(call.func, *HOROVOD)]


def _trainings(code: Code) -> list[_TrainingCode]:
    return [_TrainingCode(code, unit) for unit in list[Unit](_mains(code)) or [code.module]]


def _uses(code: Code, inside: cst.CSTNode) -> Iterator[tuple[cst.Attribute, str]]:
    """The uses of Horovod in a node: `hvd.size`, "size"."""
    for node in code.all(cst.Attribute, inside):
        name = code.name(node, *HOROVOD)
        if name and "." not in name:
            yield node, name


def first_statement(function: cst.FunctionDef) -> Any:
    """The first statement behind the docstring; None in a function of one line."""
    if not isinstance(function.body, cst.IndentedBlock):
        return None
    body = function.body.body[1 if function.get_docstring() is not None else 0 :]
    return body[0] if body else None


@rule
def _init(code: Code) -> Iterator[OldCode]:
    """`hvd.init()` that is missing, too late, or called on the driver."""
    for training in _trainings(code):
        inits = [name for _, name in training.uses if name == "init"]
        if not inits and "spmd" not in code.text:
            yield from _missing_init(code, training)
        if len(inits) == 1:
            yield from _late_init(code, training.unit)
    mains = _mains(code)
    driver = [use for use in _uses(code, code.module) if code.unit(use[0]) is code.module]
    needed = any(name not in _BEFORE_INIT for _, name in driver)
    for node, name in driver if mains else ():
        statement = code.statement(node)
        if name == "init" and statement is not None:
            yield OldCode(
                node,
                "hvd.init() here starts Horovod on the driver, not in the ranks: it belongs into "
                f"{mains[0].name.value}",
                {} if needed else code.removes(statement) or {},
            )


def _missing_init(code: Code, training: _TrainingCode) -> Iterator[OldCode]:
    unit = training.unit
    needing = [node for node, name in training.uses if name not in _BEFORE_INIT]
    outside = any(code.unit(node) is code.module for node in needing)
    # A module may have a caller that starts Horovod.
    if not needing or (unit is code.module and not outside and "__main__" not in code.text):
        return
    what = unit.name.value if isinstance(unit, cst.FunctionDef) else "The script"
    hvd = tree.dotted(needing[0].value)
    changes: tree.Changes = {}
    imported = _import_of(code, unit, hvd)
    first = first_statement(unit) if isinstance(unit, cst.FunctionDef) else None
    if imported is not None:
        changes[imported] = tree.after(f"{hvd}.init()")
    elif first is not None and code.is_bound(unit, hvd.partition(".")[0]):
        changes[first] = tree.before(f"{hvd}.init()")
    yield OldCode(needing[0], f"{what} uses Horovod and never calls hvd.init()", changes)


def _import_of(code: Code, unit: Unit, name: str) -> cst.SimpleStatementLine | None:
    """The statement of a training that imports a name."""
    for alias in code.all(cst.ImportAlias, unit):
        if name == (alias.evaluated_alias or alias.evaluated_name) and code.unit(alias) is unit:
            return code.statement(alias)
    return None


def _late_init(code: Code, unit: Unit) -> Iterator[OldCode]:
    """`hvd.init()` behind the first use of Horovod in the same block."""
    for node in [node for node, name in _uses(code, unit) if name == "init"]:
        statement = code.statement(node)
        block = None if statement is None else code.parent(statement)
        if block is None or code.unit(node) is not unit:
            continue
        if isinstance(code.parent(block), cst.For | cst.While):
            continue
        for earlier in block.body[: block.body.index(statement)]:
            if isinstance(earlier, cst.FunctionDef | cst.ClassDef):
                continue
            if any(name not in _BEFORE_INIT for _, name in _uses(code, earlier)):
                removed = code.removes(statement)
                changes = removed and {earlier: tree.before(f"{tree.dotted(node)}()"), **removed}
                why = "hvd.init() comes after the first use of Horovod"
                yield OldCode(statement or node, why, changes or {})
                return


@rule
def _broadcast(code: Code) -> Iterator[OldCode]:
    """Trainings whose ranks begin with weights of their own."""
    for training in _trainings(code):
        if any(word in training.text for word in _BROADCASTS):
            continue
        wrapped = training.wrapping(code, "DistributedOptimizer")
        in_torch = [call for call in wrapped if code.name(call.func, "horovod.torch")]
        for call in in_torch:
            yield _torch_broadcast(code, call, loads="load_state_dict" in training.text)
        if wrapped and wrapped[0] not in in_torch:
            yield _keras_broadcast(code, wrapped[0], training.calls)
        for call in training.wrapping(code, "DistributedGradientTape")[:1]:
            yield OldCode(
                call,
                "The ranks begin with different weights: after the first step write "
                "hvd.broadcast_variables(model.variables, root_rank=0) and "
                "hvd.broadcast_variables(optimizer.variables, root_rank=0)",
            )


def _torch_broadcast(code: Code, call: cst.Call, *, loads: bool) -> OldCode:
    """The finding for an optimizer; only told where weights are loaded, maybe after it is made."""
    why = "The ranks begin with different weights. Rank 0's go to all ranks before the first step"
    made = [call, *(code.values(call.args[0].value) if call.args else ())]
    having = m.Call(tree.method("named_parameters", "parameters"))
    found: list[Any] = [each for node in made for each in m.findall(node, having)]
    model = tree.dotted(found[0].func.value) if found else ""
    statement, name = code.statement(call), code.assigned(call)
    hvd = tree.dotted(call.func).rpartition(".")[0]
    if statement is None or not name or loads or not model or not hvd:
        return OldCode(
            call,
            f"{why}: hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
        )
    lines = (
        f"{hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)",
        f"{hvd}.broadcast_optimizer_state({name}, root_rank=0)",
    )
    return OldCode(call, why, {statement: tree.after(*lines)})


def _keras_broadcast(code: Code, call: cst.Call, calls: list[cst.Call]) -> OldCode:
    why = "The ranks begin with different weights. The callback gives all ranks those of rank 0"
    hvd = tree.dotted(call.func).rpartition(".")[0] if code.name(call.func, *_KERAS) else ""
    home = hvd or ("horovod.tensorflow.keras" if uses_keras_2(code) else "horovod_runner.keras")
    callback = f"{home}.callbacks.BroadcastGlobalVariablesCallback(0)"
    fit = _fit_of_model(code, calls)
    if fit is None:
        return OldCode(call, f"{why}: callbacks=[{callback}] of fit")
    given = tree.argument(fit, "callbacks", _CALLBACKS[fit.func.attr.value])
    lists = [given.value, *code.values(given.value)] if given else []
    changes: tree.Changes = {
        each: _with_element(callback) for each in lists if isinstance(each, cst.List)
    }
    if given is None and fit.args and not any(arg.star for arg in fit.args):
        changes = {fit: tree.with_argument(f"callbacks=[{callback}]")}
    is_known = hvd and code.is_bound(fit, hvd.partition(".")[0])
    return OldCode(fit, f"{why}: {callback}", changes if is_known else {})


def _fit_of_model(code: Code, calls: list[cst.Call]) -> Any:
    """The first fit of what is compiled, or the only one: generators and scalers have a fit too."""
    # A function inside another one is twice among the parts of a training.
    unique: list[Any] = list(dict.fromkeys(calls))
    fits = [call for call in unique if m.matches(call.func, tree.method(*_CALLBACKS))]
    compiles = code.found(m.Call(tree.method("compile")))
    compiled = {tree.dotted(call.func.value) for call in compiles} - {""}
    models = [fit for fit in fits if tree.dotted(fit.func.value) in compiled]
    return next(iter(models or fits[: len(fits) == 1]), None)


def _with_element(text: str) -> tree.Change:
    return lambda old: old.with_changes(
        elements=[cst.Element(cst.parse_expression(text)), *old.elements]
    )


@rule
def _optimizer(code: Code) -> Iterator[OldCode]:
    """Trainings that average nothing, and learning rates that are not scaled."""
    for training in _trainings(code):
        made = [call for call in training.calls if _is_optimizer(code, call)]
        wrapped = training.wrapping(code, "Distributed")
        used = {name for _, name in training.uses}
        averages = any("reduce" in name for name in used) or "ightning" in code.text
        if made and not wrapped and "size" in used and not averages:
            yield OldCode(
                made[0],
                "No optimizer is wrapped in hvd.DistributedOptimizer, so every rank trains a model "
                "of its own",
            )
        if made and wrapped and not _is_scaled(code, training.calls, made):
            yield _unscaled(code, made[0])


def _is_optimizer(code: Code, call: cst.Call) -> bool:
    name = code.name(call.func).replace("tensorflow.keras.", "keras.")
    kind = name.rpartition(".")[2]
    return name.startswith(_OPTIMIZERS) and kind[:1].isupper() and ".schedules." not in name


def _is_scaled(code: Code, calls: list[cst.Call], made: list[cst.Call]) -> bool:
    """Whether a learning rate depends on the number of ranks, or need not."""
    args = [arg for call in made for arg in call.args]
    texts = [code.source(arg.value) for arg in args]
    names = {node.value for arg in args for node in code.all(cst.Name, arg)}
    for assign in code.all(cst.Assign):
        targets = [tree.dotted(target.target) for target in assign.targets]
        if any(each in names or each.endswith(("lr", "learning_rate")) for each in targets):
            texts.append(code.source(assign.value))
    scales = any(
        "LearningRate" in tree.dotted(call.func) or tree.dotted(call.func).endswith("set_value")
        for call in calls
    )
    words = ("global_batch", "Adasum")
    return (
        scales
        or any(word in code.text for word in words)
        or any("size" in text or "scal" in text for text in texts)
    )


def _unscaled(code: Code, call: cst.Call) -> OldCode:
    is_torch = code.name(call.func).startswith("torch.")
    name, position = ("lr", 1) if is_torch else ("learning_rate", 0)
    rate = tree.argument(call, name, position)
    text = "..." if rate is None else code.source(rate.value)
    return OldCode(
        call,
        f"The learning rate does not depend on the number of ranks. A step has hvd.size() times as "
        f"many rows as on one rank, and usually trains best with {name}={text} * hvd.size(). Write "
        "it if the number of rows per rank is the same as on one rank",
    )
