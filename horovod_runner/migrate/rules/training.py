"""Steps of a Horovod training that are missing, or in the wrong place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, Unit, argument, dotted, walk
from horovod_runner.migrate.edits import Edit, Finding
from horovod_runner.migrate.rules.launch import RUNNERS, function_of

_TORCH = ("horovod.torch",)
_TENSORFLOW = ("horovod.tensorflow",)
_KERAS = ("horovod.keras", "horovod.tensorflow.keras", "horovod_runner.keras")
HOROVOD = (*_TORCH, *_TENSORFLOW, *_KERAS, "horovod.mxnet")
# What needs no hvd.init().
_BEFORE_INIT = frozenset(
    {
        *("init", "is_initialized", "Compression", "callbacks", "elastic", "Average", "Sum"),
        *("Adasum", "mpi_built", "gloo_built", "nccl_built", "ProcessSet"),
    }
)
_BROADCASTS = ("broadcast", "load_checkpoint", "BroadcastGlobalVariables", "elastic", "load_model")
_PARAMETERS = ("named_parameters", "parameters")
_FITS = ("fit", "fit_generator")
_OPTIMIZERS = ("keras.optimizers.", "tensorflow.optimizers.", "torch.optim.")


def mains(code: Code) -> list[cst.FunctionDef]:
    """The functions of the text that a runner calls as ranks."""
    found = []
    for call in code.calls:
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in ("run", "run_all", "start"):
            owners = [func.value, *code.values(func.value)]
            makers = [owner.func for owner in owners if isinstance(owner, cst.Call)]
            if any(code.names(maker).intersection(RUNNERS) for maker in makers) and call.args:
                found.append(function_of(code, call.args[0].value))
    for call in code.calls_of("horovod.spark.run"):
        if call.args:
            found.append(function_of(code, call.args[0].value))
    return list(dict.fromkeys(function for function in found if function is not None))


def units(code: Code) -> list[Unit]:
    """The trainings of a text: what a runner calls, or the whole of a script."""
    return list[Unit](mains(code)) or [code.module]


def horovod_name(code: Code, node: cst.CSTNode, modules: Iterable[str] = HOROVOD) -> str:
    """What a name is called in a module of Horovod's: ``size`` of ``hvd.size``; "" for others."""
    for name in code.names(node):
        for module in sorted(modules, key=len, reverse=True):
            if name.startswith(f"{module}."):
                return name.removeprefix(f"{module}.")
    return ""


def uses(code: Code, inside: cst.CSTNode) -> Iterator[tuple[cst.Attribute, str]]:
    """The uses of Horovod in a node: `hvd.size`, "size"."""
    for node in code.all(cst.Attribute, inside):
        name = horovod_name(code, node)
        if name and "." not in name:
            yield node, name


def init(code: Code) -> Iterator[Finding]:
    """`hvd.init()` that is missing, too late, or called on the driver."""
    for unit in units(code):
        yield from _missing_init(code, unit)
        yield from _late_init(code, unit)
    functions = mains(code)
    driver = [found for found in uses(code, code.module) if _is_outside(code, found[0])]
    needed = any(name not in _BEFORE_INIT for _, name in driver)
    for node, name in driver if functions else ():
        statement = code.statement(node)
        if name == "init" and statement is not None:
            removal = None if needed else code.remove(statement)
            yield code.finding(
                node,
                "hvd.init() here starts Horovod on the driver, not in the ranks: it belongs into "
                f"{functions[0].name.value}",
                *([] if removal is None else [removal]),
            )


def _is_outside(code: Code, node: cst.CSTNode) -> bool:
    return isinstance(code.unit(node), cst.Module)


def _reached(code: Code, unit: Unit) -> list[Unit]:
    """A training and the functions of the text that it calls, directly or through others."""
    found: list[Unit] = [unit]
    for reached in found if isinstance(unit, cst.FunctionDef) else ():
        for call in code.all(cst.Call, reached):
            function = function_of(code, call.func)
            if function is not None and function not in found:
                found.append(function)
    return found


def _missing_init(code: Code, unit: Unit) -> Iterator[Finding]:
    used = [found for part in _reached(code, unit) for found in uses(code, part)]
    if any(name == "init" for _, name in used) or "spmd" in code.text:
        return
    needing = [node for node, name in used if name not in _BEFORE_INIT]
    if not needing:
        return
    first = needing[0]
    outside = [node for node in needing if _is_outside(code, node)]
    if isinstance(unit, cst.Module) and not outside and "__main__" not in code.text:
        return  # a module whose caller starts Horovod
    what = f"{unit.name.value} uses" if isinstance(unit, cst.FunctionDef) else "The script uses"
    why = f"{what} Horovod and never calls hvd.init()"
    hvd = dotted(first.value)
    place = _import_of(code, unit, hvd)
    if place is not None:
        yield code.finding(first, why, code.after(place, f"{hvd}.init()"))
    elif isinstance(unit, cst.FunctionDef) and code.is_bound(unit, hvd.partition(".")[0]):
        begin = first_statement(unit)
        edits = () if begin is None else (code.before(begin, f"{hvd}.init()"),)
        yield code.finding(first, why, *edits)
    else:
        yield code.finding(first, why)


def _import_of(code: Code, unit: Unit, name: str) -> cst.SimpleStatementLine | None:
    """The statement of a training that imports a name."""
    for node in walk(unit):
        if isinstance(node, cst.Import | cst.ImportFrom) and code.unit(node) is unit:
            aliases = () if isinstance(node.names, cst.ImportStar) else node.names
            if name in [alias.evaluated_alias or alias.evaluated_name for alias in aliases]:
                return code.statement(node)
    return None


def first_statement(function: cst.FunctionDef) -> cst.CSTNode | None:
    """The first statement behind the docstring."""
    if not isinstance(function.body, cst.IndentedBlock):
        return None
    body = list(function.body.body)
    if function.get_docstring() is not None:
        body = body[1:]
    return body[0] if body else None


def _late_init(code: Code, unit: Unit) -> Iterator[Finding]:
    """`hvd.init()` behind the first use of Horovod in the same block."""
    for node, name in uses(code, unit):
        statement = code.statement(node)
        if name != "init" or statement is None or code.unit(node) is not unit:
            continue
        block = code.parent(statement)
        if not isinstance(block, cst.IndentedBlock | cst.Module):
            continue
        for earlier in block.body:
            if earlier is statement:
                break
            if isinstance(earlier, cst.FunctionDef | cst.ClassDef):
                continue
            if any(each not in _BEFORE_INIT for _, each in uses(code, earlier)):
                removal = code.remove(statement)
                edits = (code.before(earlier, code.source(statement)), removal)
                yield code.finding(
                    statement,
                    "hvd.init() comes after the first use of Horovod",
                    *(edit for edit in edits if edit is not None and removal is not None),
                )
                return


def broadcast(code: Code) -> Iterator[Finding]:
    """Trainings whose ranks begin with weights of their own."""
    for unit in units(code):
        parts = _reached(code, unit)
        texts = "".join(code.source(part) for part in parts)
        if any(word in texts for word in _BROADCASTS):
            continue
        calls = [call for part in parts for call in code.all(cst.Call, part)]
        wrapped = [c for c in calls if horovod_name(code, c.func) == "DistributedOptimizer"]
        for call in wrapped:
            if horovod_name(code, call.func, _TORCH):
                yield _torch_broadcast(code, call, loads="load_state_dict" in texts)
        if wrapped and not horovod_name(code, wrapped[0].func, _TORCH):
            yield _keras_broadcast(code, wrapped[0], unit)
        for call in calls:
            if horovod_name(code, call.func) == "DistributedGradientTape":
                yield code.finding(
                    call,
                    "The ranks begin with different weights: after the first step write "
                    "hvd.broadcast_variables(model.variables, root_rank=0) and "
                    "hvd.broadcast_variables(optimizer.variables, root_rank=0)",
                )
                break


def _torch_broadcast(code: Code, call: cst.Call, *, loads: bool) -> Finding:
    """The finding for an optimizer; only told where weights are loaded, maybe after it is made."""
    why = "The ranks begin with different weights. Rank 0's go to all ranks before the first step"
    statement, target = code.statement(call), code.assigned(call)
    model = _model_of(code, call)
    hvd = dotted(call.func).rpartition(".")[0]
    if statement is None or target is None or loads or not model or not hvd:
        return code.finding(
            call,
            f"{why}: hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
        )
    return code.finding(
        call,
        why,
        code.after(
            statement,
            f"{hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)",
            f"{hvd}.broadcast_optimizer_state({target.value}, root_rank=0)",
        ),
    )


def _model_of(code: Code, call: cst.Call) -> str:
    """The text of the model whose parameters an optimizer has; "" if it is not known."""
    expressions: list[cst.CSTNode] = [call]
    if call.args:
        expressions += code.values(call.args[0].value)
    for expression in expressions:
        for inner in code.all(cst.Call, expression):
            func = inner.func
            if isinstance(func, cst.Attribute) and func.attr.value in _PARAMETERS:
                return dotted(func.value)
    return ""


def _keras_broadcast(code: Code, call: cst.Call, unit: Unit) -> Finding:
    why = "The ranks begin with different weights. The callback gives all ranks those of rank 0"
    hvd = dotted(call.func).rpartition(".")[0]
    callback = f"{hvd}.callbacks.BroadcastGlobalVariablesCallback(0)"
    for fit in code.all(cst.Call, unit):
        if not isinstance(fit.func, cst.Attribute) or fit.func.attr.value not in _FITS:
            continue
        callbacks = argument(fit, "callbacks")
        edits = _add_callback(code, fit, callbacks, callback) if hvd else ()
        return code.finding(fit, f"{why}: {callback}", *edits)
    return code.finding(call, f"{why}: callbacks=[{callback}] of fit")


def _add_callback(
    code: Code, fit: cst.Call, callbacks: cst.Arg | None, callback: str
) -> tuple[Edit, ...]:
    if callbacks is None:
        if not fit.args:
            return ()
        end = code.end(fit.args[-1])
        return (Edit(end, end, f", callbacks=[{callback}]"),)
    lists = [callbacks.value, *code.values(callbacks.value)]
    for value in lists:
        if isinstance(value, cst.List):
            begin = code.start(value) + 1
            comma = ", " if value.elements else ""
            return (Edit(begin, begin, callback + comma),)
    return ()


def optimizer(code: Code) -> Iterator[Finding]:
    """Trainings that average nothing, and learning rates that are not scaled."""
    for unit in units(code):
        calls = [call for part in _reached(code, unit) for call in code.all(cst.Call, part)]
        made = [call for call in calls if _is_optimizer(code, call)]
        wrapped = [c for c in calls if horovod_name(code, c.func).startswith("Distributed")]
        used = {name for part in _reached(code, unit) for _, name in uses(code, part)}
        averages = any("reduce" in name for name in used) or "ightning" in code.text
        if made and not wrapped and "size" in used and not averages:
            yield code.finding(
                made[0],
                "No optimizer is wrapped in hvd.DistributedOptimizer, so every rank trains a model "
                "of its own",
            )
        if made and wrapped and not _is_scaled(code, calls, made):
            yield _unscaled(code, made[0])


def _is_optimizer(code: Code, call: cst.Call) -> bool:
    name = code.name(call.func).replace("tensorflow.keras.", "keras.")
    kind = name.rpartition(".")[2]
    return name.startswith(_OPTIMIZERS) and kind[:1].isupper() and ".schedules." not in name


def _is_scaled(code: Code, calls: list[cst.Call], made: list[cst.Call]) -> bool:
    """Whether a learning rate depends on the number of ranks, or need not."""
    if "global_batch" in code.text or "Adasum" in code.text:
        return True
    texts = [code.source(arg.value) for call in made for arg in call.args]
    names = [node.value for call in made for arg in call.args for node in code.all(cst.Name, arg)]
    for assign in code.all(cst.Assign):
        targets = [target.target for target in assign.targets]
        if any(isinstance(t, cst.Name) and t.value in names for t in targets):
            texts.append(code.source(assign.value))
        if any(dotted(t).endswith(("lr", "learning_rate")) for t in targets):
            texts.append(code.source(assign.value))
    callbacks = [call for call in calls if "LearningRate" in dotted(call.func)]
    scalers = [call for call in calls if dotted(call.func).endswith("set_value")]
    return bool(callbacks or scalers) or any("size" in text or "scal" in text for text in texts)


def _unscaled(code: Code, call: cst.Call) -> Finding:
    is_torch = code.name(call.func).startswith("torch.")
    rate = argument(call, "lr", 1 if is_torch else None) or argument(call, "learning_rate", 0)
    name = "lr" if is_torch else "learning_rate"
    text = "0.001" if rate is None else code.source(rate.value)
    return code.finding(
        call,
        f"The learning rate does not depend on the number of ranks. A step has hvd.size() times as "
        f"many rows as on one rank, and usually trains best with {name}={text} * hvd.size(). Write "
        "it if the number of rows per rank is the same as on one rank",
    )
