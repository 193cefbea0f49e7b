"""Arguments of callbacks, and the names of files, that Keras 3 and newer Horovods require."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate.code import Code, argument, dotted, is_value, string
from horovod_runner.migrate.edits import Finding
from horovod_runner.migrate.rules.keras import applies, is_optimizer

_MODEL, _WEIGHTS = (".keras", ".h5"), (".weights.h5",)
# An expression that may be computed twice: names, numbers, products, hvd.size().
_PLAIN = re.compile(r"[\w.*/ ]+(\(\))?[\w.*/ ]*")


def files(code: Code) -> Iterator[Finding]:
    """The names of files that `ModelCheckpoint` and `save_weights` write."""
    for call in code.calls if applies(code) else ():
        function = dotted(call.func).rpartition(".")[2]
        path = argument(call, "filepath", 0)
        if path is None or function not in ("ModelCheckpoint", "save_weights"):
            continue
        only = argument(call, "save_weights_only")
        weights = function == "save_weights" or (only is not None and is_value(only.value, "True"))
        endings = _WEIGHTS if weights else _MODEL
        literal = _last_text(code, path.value)
        if literal is None or literal.endswith(endings):
            continue
        stem = re.sub(r"\.(ckpt|hdf5|h5|tf|weights)$", "", literal)
        why = (
            f"Keras 3 writes {'weights' if weights else 'a model'} only to a file whose name ends "
            f"with {' or '.join(endings)}"
        )
        if stem == literal:
            yield code.finding(call, why)
            continue
        edits = [
            code.replace(text, text.value.replace(literal, stem + endings[0]))
            for text in code.all(cst.SimpleString)
            if string(text) == literal
        ]
        yield code.finding(call, why, *edits)


def _last_text(code: Code, node: cst.BaseExpression) -> str | None:
    """The literal that a path ends with; None if it ends with something else."""
    if isinstance(node, cst.BinaryOperation):
        return _last_text(code, node.right)
    if isinstance(node, cst.Call) and dotted(node.func).endswith("join") and node.args:
        return _last_text(code, node.args[-1].value)
    if isinstance(node, cst.Name):
        values = code.values(node)
        return _last_text(code, values[0]) if len(values) == 1 else None
    return string(node)


def warmup(code: Code) -> Iterator[Finding]:
    """`LearningRateWarmupCallback` without the learning rate, as before Horovod 0.21."""
    for call in code.calls:
        name = dotted(call.func)
        if not name.endswith("callbacks.LearningRateWarmupCallback"):
            continue
        if argument(call, "initial_lr", 0) is not None:
            continue
        rates = {
            code.source(rate.value)
            for made in code.calls
            if is_optimizer(code, made)
            and (rate := argument(made, "learning_rate") or argument(made, "lr"))
            and code.unit(made) is code.unit(call)
        }
        rate_text = rates.pop() if len(rates) == 1 else ""
        edits = []
        if _PLAIN.fullmatch(rate_text):
            comma = ", " if call.args else ""
            edits.append(code.insert(code.end(call.func) + 1, f"initial_lr={rate_text}{comma}"))
        yield code.finding(
            call, "The callback needs initial_lr, the learning rate of the optimizer", *edits
        )


def checkpoints(code: Code) -> Iterator[Finding]:
    """`tf.train.latest_checkpoint`, which does not find the files of Keras 3."""
    for call in code.calls_of("tensorflow.train.latest_checkpoint") if applies(code) else ():
        yield code.finding(
            call,
            "latest_checkpoint finds TensorFlow's checkpoints alone, not the files of Keras 3: "
            "take the newest file of the folder, or use ReportCallback() and load_checkpoint()",
        )
