"""Calls that start ranks: TorchDistributor, horovod.spark.run, HorovodRunner(np=0)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, argument, dotted, is_value, keywords, string
from horovod_runner.migrate.edits import Edit, Finding

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
RUNNERS = ("horovod_runner.HorovodRunner", "sparkdl.HorovodRunner")


def zero_ranks(code: Code) -> Iterator[Finding]:
    """`HorovodRunner(np=0)`, whose number of ranks depends on when it runs."""
    for call in code.calls_of(*RUNNERS):
        np = argument(call, "np", 0)
        if np is None:
            continue
        if np.keyword is None:
            yield code.finding(
                call, "np is a keyword argument now", Edit(code.start(np), code.start(np), "np=")
            )
        elif is_value(np.value, "0"):
            yield code.finding(
                call,
                "np=0 takes as many ranks as Spark has slots when the call runs, so two runs may "
                "differ. It still works, with a warning. Write the number of ranks",
            )


def torch_distributor(code: Code) -> Iterator[Finding]:
    """TorchDistributor, whose calls become HorovodRunner's."""
    calls = list(code.calls_of(_DISTRIBUTOR))
    if not calls:
        return
    why = (
        "HorovodRunner starts the same ranks with the same variables for torch.distributed, and "
        "reports failures, hangs and metrics"
    )
    edits: list[Edit] = []
    for call in calls:
        found = _distributor(code, call)
        if isinstance(found, Finding):
            yield found
            return
        edits += found
    imports = _import_edits(code, "pyspark.ml.torch.distributor", "TorchDistributor")
    if imports is None:
        yield code.finding(calls[0], f"{why}: {_IMPORT}")
        return
    yield code.finding(calls[0], why, *edits, *imports)


def _distributor(code: Code, call: cst.Call) -> list[Edit] | Finding:
    """The edits for one TorchDistributor and its runs; a finding if there is something else."""
    processes = argument(call, "num_processes", 0)
    local, gpu = argument(call, "local_mode", 1), argument(call, "use_gpu", 2)
    if local is not None and not is_value(local.value, "True", "False"):
        return code.finding(
            call,
            "TorchDistributor(local_mode=...): write HorovodRunner(np=-n) for processes on this "
            "machine, and np=n for Spark's task slots",
        )
    count = "1" if processes is None else code.source(processes.value)
    is_local = local is None or is_value(local.value, "True")
    options = [] if is_local else ['driver_log_verbosity="all"']
    if is_local:
        count = f"-{count}" if re.fullmatch(r"[\w.]+", count) else f"-({count})"
    options.insert(0, f"np={count}")
    if gpu is not None and is_value(gpu.value, "False"):
        options.append("gpus_per_rank=0")
    elif gpu is not None and not is_value(gpu.value, "True"):
        options.append(f"gpus_per_rank=None if {code.source(gpu.value)} else 0")
    edits = [code.replace(call, f"HorovodRunner({', '.join(options)})")]
    for run in _runs(code, call):
        new = _keyword_call(code, run)
        if new is None:
            return code.finding(
                run,
                "HorovodRunner.run calls a function with keyword arguments. For a file: "
                "`horovod-runner run FILE --np N -- ARGUMENTS`",
            )
        edits += new
    return edits


def _runs(code: Code, maker: cst.Call) -> Iterator[cst.Call]:
    """The calls of `run` of what a call makes."""
    for call in code.calls:
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "run":
            continue
        owner = call.func.value
        if owner is maker or maker in code.values(owner):
            yield call


def _keyword_call(code: Code, run: cst.Call) -> list[Edit] | None:
    """Give the positional arguments of a call behind the function their keywords."""
    if not run.args or string(run.args[0].value) is not None or run.args[0].star:
        return None
    names = _parameters(code, run.args[0].value)
    edits = []
    for index, arg in enumerate(run.args[1:]):
        if arg.keyword is None and arg.star != "**":
            if arg.star or names is None or index >= len(names):
                return None
            edits.append(Edit(code.start(arg), code.start(arg), f"{names[index]}="))
    return edits


def function_of(code: Code, node: cst.BaseExpression) -> cst.FunctionDef | None:
    """The function that a name stands for: the last one of this name before it, or the only one."""
    if not isinstance(node, cst.Name):
        return None
    found = [
        function
        for function in code.all(cst.FunctionDef)
        if function.name.value == node.value and not _is_method(code, function)
    ]
    before = [function for function in found if code.start(function) < code.start(node)]
    if before:
        return before[-1]
    return found[0] if len(found) == 1 else None


def _is_method(code: Code, function: cst.FunctionDef) -> bool:
    block = code.parent(function)
    return block is not None and isinstance(code.parent(block), cst.ClassDef)


def _parameters(code: Code, node: cst.BaseExpression) -> list[str] | None:
    """The names of a function's positional parameters; None if they are not known."""
    function = function_of(code, node)
    if function is None or isinstance(function.params.star_arg, cst.Param):
        return None
    return [param.name.value for param in function.params.params]


def horovod_spark_run(code: Code) -> Iterator[Finding]:
    """`horovod.spark.run` with a number of processes."""
    calls = list(code.calls_of(_RUN))
    new = [_run_all(code, call) for call in calls]
    if not calls or None in new:
        return  # install() gives the call to this package
    imports = _import_edits(code, "horovod.spark", "run")
    edits = [code.replace(call, text) for call, text in zip(calls, new, strict=True) if text]
    if imports is None:
        return
    yield code.finding(
        calls[0],
        "HorovodRunner.run_all returns the values of all ranks, as horovod.spark.run did. Output "
        "and timeouts need no arguments; np must be a number, not None",
        *edits,
        *imports,
    )


def _run_all(code: Code, call: cst.Call) -> str | None:
    """The text of the call with HorovodRunner; None if it cannot be told."""
    given = {name: argument(call, name, position) for position, name in enumerate(_RUN_ARGUMENTS)}
    function, args, kwargs, num_proc = given.values()
    others = keywords(call) - set(_RUN_ARGUMENTS) - _NOT_NEEDED - {"env"}
    if function is None or num_proc is None or is_value(num_proc.value, "None") or others:
        return None
    if len([arg for arg in call.args if arg.keyword is None]) > len(_RUN_ARGUMENTS):
        return None
    options = [f"np={code.source(num_proc.value)}", 'driver_log_verbosity="all"']
    env = argument(call, "env")
    if env is not None:
        options.append(code.source(env))
    passed = [code.source(function.value)]
    if args is not None and not is_value(args.value, "None"):
        names = _parameters(code, function.value)
        if not isinstance(args.value, cst.Tuple | cst.List) or names is None:
            return None
        values = [code.source(element.value) for element in args.value.elements]
        if len(values) > len(names):
            return None
        passed += [f"{name}={value}" for name, value in zip(names, values, strict=False)]
    if kwargs is not None and not is_value(kwargs.value, "None"):
        passed += _keywords(code, kwargs.value)
    return f"HorovodRunner({', '.join(options)}).run_all({', '.join(passed)})"


def _keywords(code: Code, node: cst.BaseExpression) -> list[str]:
    """The text of keyword arguments for a dict."""
    texts = []
    for element in node.elements if isinstance(node, cst.Dict) else [None]:
        name = string(element.key) if isinstance(element, cst.DictElement) else None
        if element is None or name is None or not name.isidentifier():
            return [f"**{code.source(node)}"]
        texts.append(f"{name}={code.source(element.value)}")
    return texts


def _import_edits(code: Code, module: str, name: str) -> list[Edit] | None:
    """Import HorovodRunner in place of a name of a module; None if something else uses it too."""
    edits = []
    for node in code.all(cst.ImportFrom):
        if node.module is None or isinstance(node.names, cst.ImportStar):
            continue
        if dotted(node.module) == module:
            if [dotted(alias.name) for alias in node.names] != [name]:
                return None
            edits.append(code.replace(node, _IMPORT))
    for imported in code.all(cst.Import):
        if dotted(imported.names[0].name) == module:
            if len(imported.names) > 1 or _other_uses(code, module, name):
                return None
            edits.append(code.replace(imported, _IMPORT))
    return edits or None


def _other_uses(code: Code, module: str, name: str) -> bool:
    """Whether another name of a module, or of its package, is used through `import module`."""
    package = module.partition(".")[0]
    return any(
        dotted(node).partition(".")[0] == package
        and not dotted(node).startswith(f"{module}.{name}")
        for node in code.all(cst.Attribute)
        if not isinstance(code.parent(node), cst.Attribute)
        and not code.around(node, cst.Import)
        and not code.around(node, cst.ImportFrom)
    )
