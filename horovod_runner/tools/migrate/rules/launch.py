"""Calls that start ranks: TorchDistributor, horovod.spark.run, HorovodRunner(np=0)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.rule import on, rule

_DISTRIBUTOR = "pyspark.ml.torch.distributor.TorchDistributor"
_RUN = "horovod.spark.run"
_RUN_ARGUMENTS = ("fn", "args", "kwargs", "num_proc")
# Arguments of horovod.spark.run without a counterpart that are not needed.
_NOT_NEEDED = frozenset(
    {
        *("start_timeout", "use_mpi", "use_gloo", "stdout", "stderr", "verbose", "nics"),
        "prefix_output_with_timestamp",
    }
)
_IMPORT = "from horovod_runner import HorovodRunner"
_RUNNERS = ("horovod_runner.HorovodRunner", "sparkdl.HorovodRunner")


def runs(code: Code, *makers: str, by: tuple[str, ...] = ("run", "run_all")) -> Iterator[cst.Call]:
    """The calls that start ranks: of a method of what these names make, HorovodRunner if none."""
    for call in code.found(m.Call(tree.method(*by), [m.AtLeastN(n=1)])):
        owners = [call.func.value, *code.values(call.func.value)]
        made = {name for o in owners if isinstance(o, cst.Call) for name in code.names(o.func)}
        if made & {*(makers or _RUNNERS)}:
            yield call


def function_of(code: Code, node: cst.CSTNode) -> cst.FunctionDef | None:
    """The function that a name stands for: the last one of this name before it, or the only one."""
    if not isinstance(node, cst.Name):
        return None
    found: list[cst.FunctionDef] = [
        function
        for function in code.found(m.FunctionDef(m.Name(node.value)))
        if not isinstance(code.parent(code.parent(function)), cst.ClassDef)
    ]
    before = [each for each in found if code.new_line(each) < code.new_line(node)]
    if before:
        return before[-1]
    return found[0] if len(found) == 1 else None


def _parameters(code: Code, node: cst.CSTNode) -> list[str]:
    """The names of a function's positional parameters; [] if they are not known."""
    function = function_of(code, node)
    if function is None or isinstance(function.params.star_arg, cst.Param):
        return []
    return [param.name.value for param in function.params.params]


@on(m.Call(tree.named(*_RUNNERS)))
def _zero_ranks(_code: Code, call: cst.Call) -> OldCode | None:
    np = tree.argument(call, "np", 0)
    if np is not None and np.keyword is None:
        return OldCode(call, "np is a keyword argument now", {np: tree.with_keyword("np")})
    why = (
        "np=0 takes as many ranks as Spark has slots when the call runs, so two runs may differ. "
        "It still works, with a warning. Write the number of ranks"
    )
    return OldCode(call, why) if tree.is_value(np, "0") else None


@rule
def _torch_distributor(code: Code) -> Iterator[OldCode]:
    """TorchDistributor, whose calls become HorovodRunner's."""
    why = (
        "HorovodRunner starts the same ranks with the same variables for torch.distributed, and "
        "reports failures, hangs and metrics"
    )
    calls = list(code.found(m.Call(tree.named(_DISTRIBUTOR))))
    changes: tree.Changes = {}
    for call in calls:
        local = tree.argument(call, "local_mode", 1)
        if local is not None and not tree.is_value(local, "True", "False"):
            yield OldCode(
                call,
                "TorchDistributor(local_mode=...): write HorovodRunner(np=-n) for processes on "
                "this machine, and np=n for Spark's task slots",
            )
            return
        changes[call] = tree.becomes(_runner(code, call, local=not tree.is_value(local, "False")))
    for run in runs(code, _DISTRIBUTOR):
        function, *args = run.args
        passed = [arg for arg in args if arg.keyword is None and arg.star != "**"]
        names = _parameters(code, function.value)
        starred = any(arg.star for arg in (function, *passed))
        if starred or tree.string(function.value) is not None or len(passed) > len(names):
            yield OldCode(
                run,
                "HorovodRunner.run calls a function with keyword arguments. For a file: "
                "`horovod-runner run FILE --np N -- ARGUMENTS`",
            )
            return
        changes |= {arg: tree.with_keyword(name) for arg, name in zip(passed, names, strict=False)}
    if calls:
        imports = _imports(code, "pyspark.ml.torch.distributor", "TorchDistributor")
        yield OldCode(
            calls[0], why if imports else f"{why}: {_IMPORT}", changes | imports if imports else {}
        )


def _runner(code: Code, call: cst.Call, *, local: bool) -> str:
    """The text of HorovodRunner for a TorchDistributor."""
    processes, gpu = tree.argument(call, "num_processes", 0), tree.argument(call, "use_gpu", 2)
    count = "1" if processes is None else code.source(processes.value)
    options = [f"np={count}", 'driver_log_verbosity="all"']
    if local:
        options = [f"np=-{count}" if re.fullmatch(r"[\w.]+", count) else f"np=-({count})"]
    if tree.is_value(gpu, "False"):
        options.append("gpus_per_rank=0")
    elif gpu is not None and not tree.is_value(gpu, "True"):
        options.append(f"gpus_per_rank=None if {code.source(gpu.value)} else 0")
    return f"HorovodRunner({', '.join(options)})"


@rule
def horovod_spark_run(code: Code) -> Iterator[OldCode]:
    """`horovod.spark.run` with a number of processes; install() is for other calls."""
    new = {call: _run_all(code, call) for call in code.found(m.Call(tree.named(_RUN)))}
    imports = _imports(code, "horovod.spark", "run")
    if new and all(new.values()) and imports:
        yield OldCode(
            next(iter(new)),
            "HorovodRunner.run_all returns the values of all ranks, as horovod.spark.run did. "
            "Output and timeouts need no arguments; np must be a number, not None",
            {call: tree.becomes(text) for call, text in new.items()} | imports,
        )


def _run_all(code: Code, call: cst.Call) -> str:
    """The text of the call with HorovodRunner; "" if it cannot be told."""
    function, args, kwargs, num_proc = (
        tree.argument(call, name, position) for position, name in enumerate(_RUN_ARGUMENTS)
    )
    others = {*tree.keywords(call)} - {*_RUN_ARGUMENTS, "env"} - _NOT_NEEDED
    by_position = [arg for arg in call.args if arg.keyword is None]
    if function is None or num_proc is None or tree.is_value(num_proc, "None") or others:
        return ""
    if len(by_position) > len(_RUN_ARGUMENTS):
        return ""
    options = [f"np={code.source(num_proc.value)}", 'driver_log_verbosity="all"']
    if env := tree.argument(call, "env"):
        options.append(f"env={code.source(env.value)}")
    passed = [code.source(function.value)]
    if args is not None and not tree.is_value(args, "None"):
        names = _parameters(code, function.value)
        elements = getattr(args.value, "elements", None)
        if elements is None or isinstance(args.value, cst.Dict) or len(elements) > len(names):
            return ""
        values = [code.source(element.value) for element in elements]
        passed += [f"{name}={value}" for name, value in zip(names, values, strict=False)]
    if kwargs is not None and not tree.is_value(kwargs, "None"):
        passed += _keywords(code, kwargs.value)
    return f"HorovodRunner({', '.join(options)}).run_all({', '.join(passed)})"


def _keywords(code: Code, node: cst.BaseExpression) -> list[str]:
    """The text of keyword arguments for a dict."""
    elements: Any = node.elements if isinstance(node, cst.Dict) else [None]
    pairs = [(tree.string(getattr(each, "key", None)), each) for each in elements]
    if not all(name and name.isidentifier() for name, _ in pairs):
        return [f"**{code.source(node)}"]
    return [f"{name}={code.source(element.value)}" for name, element in pairs]


def _imports(code: Code, module: str, name: str) -> tree.Changes:
    """Import HorovodRunner in place of a name of a module; {} if something else uses it too."""
    changes: tree.Changes = {}
    nodes: list[Any] = [*code.all(cst.ImportFrom), *code.all(cst.Import)]
    for node in nodes:
        imported = tree.imports_of(node)
        if tree.dotted(getattr(node, "module", None)) == module or module in imported:
            whole = isinstance(node, cst.Import)
            if len(imported) > 1 or (not whole and imported != [f"{module}.{name}"]):
                return {}
            if whole and _other_uses(code, module, name):
                return {}
            changes[node] = lambda _: tree.statements(_IMPORT)[0].body[0]
    return changes


def _other_uses(code: Code, module: str, name: str) -> bool:
    """Whether another name of a module, or of its package, is used through `import module`."""
    package = module.partition(".")[0]
    return any(
        tree.dotted(node).partition(".")[0] == package
        and not tree.dotted(node).startswith(f"{module}.{name}")
        and not isinstance(code.parent(node), cst.Attribute)
        and not code.around(node, cst.Import, cst.ImportFrom)
        for node in code.all(cst.Attribute)
    )
