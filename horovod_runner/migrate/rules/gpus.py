"""GPUs that code names by their number, which all ranks of a host would share."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, argument, dotted, is_value, string, without_arguments
from horovod_runner.migrate.edits import Finding
from horovod_runner.migrate.rules.training import HOROVOD

_WHY = (
    "All ranks of a host would use GPU 0. Without a number it is the rank's own GPU, which is its "
    "current device from the import of torch on"
)


def _applies(code: Code) -> bool:
    return code.imports("torch") and code.imports(
        *HOROVOD, "horovod_runner", "sparkdl", "pyspark.ml.torch.distributor"
    )


def numbers(code: Code) -> Iterator[Finding]:
    """`.cuda(0)`, `.to(0)`, `"cuda:0"`, `torch.device("cuda", 0)`, `set_device(0)`."""
    for call in code.calls if _applies(code) else ():
        function = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        first = call.args[0] if call.args else None
        if first is not None and is_value(first.value, "0"):
            if code.name(call.func) == "torch.cuda.set_device":
                bound = code.is_bound(call, "hvd")
                edits = (code.replace(first.value, "hvd.local_rank()"),) if bound else ()
                yield code.finding(
                    call, "All ranks of a host would use GPU 0: hvd.local_rank()", *edits
                )
            elif function == "cuda":
                yield code.finding(call, _WHY, *without_arguments(code, call, first))
            elif function == "to":
                yield code.finding(call, _WHY, code.replace(first.value, '"cuda"'))
        elif code.name(call.func) == "torch.device":
            index = argument(call, "index", 1)
            if index is not None and is_value(index.value, "0"):
                yield code.finding(call, _WHY, *without_arguments(code, call, index))


def names(code: Code) -> Iterator[Finding]:
    """`"cuda:0"`."""
    for text in code.all(cst.SimpleString) if _applies(code) else ():
        if string(text) == "cuda:0":
            yield code.finding(text, _WHY, code.replace(text, text.value.replace(":0", "")))


def other_ways(code: Code) -> Iterator[Finding]:
    """`DataParallel`, and CUDA_VISIBLE_DEVICES."""
    if not _applies(code):
        return
    for call in code.calls:
        if code.name(call.func) in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            yield code.finding(
                call,
                "DataParallel uses all GPUs of a host from one process. A rank has one GPU: leave "
                "the model as it is",
            )
    for assign in code.all(cst.Assign):
        target = assign.targets[0].target
        if (
            isinstance(target, cst.Subscript)
            and dotted(target.value) == "os.environ"
            and "CUDA_VISIBLE_DEVICES" in code.source(target)
            and string(assign.value) not in ("", "-1")
        ):
            yield code.finding(
                assign,
                "A rank has its GPU already. CUDA_VISIBLE_DEVICES lists those of all ranks of the "
                "host, and hvd.local_rank() is its place in the list: leave it as it is",
            )
