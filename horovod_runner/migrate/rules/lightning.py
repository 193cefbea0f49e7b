"""Lightning's Horovod strategy, which Lightning 2 has removed."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, argument, dotted, string
from horovod_runner.migrate.edits import Finding

_IMPORT = "from horovod_runner.lightning import HorovodStrategy"


def strategy(code: Code) -> Iterator[Finding]:
    """`Trainer(strategy="horovod")`, in Lightning 1.5 `accelerator="horovod"`."""
    for call in code.calls:
        if not dotted(call.func).endswith("Trainer"):
            continue
        for name in ("strategy", "accelerator", "distributed_backend"):
            arg = argument(call, name)
            if arg is None or string(arg.value) != "horovod":
                continue
            statement = code.around(call, cst.SimpleStatementLine)
            edits = [code.replace(arg, "strategy=HorovodStrategy()")]
            if not code.is_bound(call, "HorovodStrategy") and statement is not None:
                edits.append(code.before(statement, _IMPORT))
            yield code.finding(
                call,
                "Lightning 2 has no strategy for Horovod: horovod_runner.lightning has",
                *edits,
            )
