"""GPUs that code names by their number, which all ranks of a host would share."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.rule import fix, on
from horovod_runner.tools.migrate.rules.training import HOROVOD

_WHY = (
    "All ranks of a host would use GPU 0. Without a number it is the rank's own GPU, which is its "
    "current device from the import of torch on"
)
_ZERO = m.Arg(value=m.Integer("0"))
_RANKS = (*HOROVOD, "horovod_runner", "sparkdl", "pyspark.ml.torch.distributor")


def _applies(code: Code) -> bool:
    return code.imports("torch") and code.imports(*_RANKS)


@on(m.Call(tree.named("torch.cuda.set_device"), [_ZERO]), when=_applies)
def _set_device(code: Code, call: cst.Call) -> OldCode:
    bound = code.is_bound(call, "hvd")
    changes = {call.args[0].value: tree.becomes("hvd.local_rank()")} if bound else {}
    return OldCode(call, "All ranks of a host would use GPU 0: hvd.local_rank()", changes)


fix(
    m.Call(tree.method("cuda"), [_ZERO, m.ZeroOrMore()]),
    _WHY,
    lambda call: tree.without(call, call.args[0])(call),
    when=_applies,
)
fix(
    m.Call(tree.named("torch.device"), [m.Arg(), _ZERO]),
    _WHY,
    lambda call: tree.without(call, call.args[1])(call),
    when=_applies,
)
fix(
    m.Call(tree.method("to"), [_ZERO, m.ZeroOrMore()]),
    _WHY,
    lambda call: call.with_deep_changes(call.args[0], value=tree.expression('"cuda"')),
    when=_applies,
)
fix(
    m.SimpleString(m.MatchIfTrue(lambda text: text.strip("\"'") == "cuda:0")),
    _WHY,
    lambda text: text.with_changes(value=text.value.replace(":0", "")),
    when=_applies,
)
fix(
    m.Call(tree.named("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")),
    "DataParallel uses all GPUs of a host from one process. A rank has one GPU: leave the model as "
    "it is",
    when=_applies,
)
fix(
    m.Assign(
        [m.AssignTarget(m.Subscript(m.MatchIfTrue(lambda node: tree.dotted(node) == "os.environ")))]
    ),
    "A rank has its GPU already. CUDA_VISIBLE_DEVICES lists those of all ranks of the host, and "
    "hvd.local_rank() is its place in the list: leave it as it is",
    when=_applies,
    where=lambda code, assign: (
        "CUDA_VISIBLE_DEVICES" in code.source(assign.targets[0].target)
        and tree.string(assign.value) not in ("", "-1")
    ),
)
