"""Calls and attributes of Keras 2 that Keras 3 does not have."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from horovod_runner.migrate import names
from horovod_runner.migrate.code import (
    Code,
    argument,
    dotted,
    is_value,
    walk,
    without_arguments,
)
from horovod_runner.migrate.edits import Edit, Finding
from horovod_runner.migrate.rules.imports import uses_keras_2

_GENERATORS = {
    "fit_generator": "fit",
    "evaluate_generator": "evaluate",
    "predict_generator": "predict",
}
# Their positional arguments, in order; the first is called x today.
_POSITIONS = {
    "fit_generator": (
        *("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
        *("validation_steps", "validation_freq", "class_weight"),
    ),
    "evaluate_generator": ("x", "steps", "callbacks"),
    "predict_generator": ("x", "steps", "callbacks"),
}
_DROPPED = ("workers", "use_multiprocessing", "max_queue_size", "pickle_safe", "max_q_size")
_WRAPPERS = ("DistributedOptimizer", "LossScaleOptimizer")


def applies(code: Code) -> bool:
    """Whether the text uses Keras, and does not say that it is Keras 2."""
    return code.imports("keras", "tensorflow") and not uses_keras_2(code)


def keras_name(code: Code, node: cst.CSTNode) -> str:
    """The full name of something in Keras, without ``tensorflow.`` before it; "" for others."""
    for name in code.names(node):
        short = name.removeprefix("tensorflow.")
        if short.startswith(("keras.", "optimizers.")):
            return short if short.startswith("keras.") else f"keras.{short}"
    return ""


def is_optimizer(code: Code, node: cst.BaseExpression) -> bool:
    """Whether an expression is an optimizer of Keras, as far as the text says."""
    if isinstance(node, cst.Attribute):
        return node.attr.value == "optimizer" and not code.imports("torch")
    if isinstance(node, cst.Call):
        name = keras_name(code, node.func)
        return name.startswith("keras.optimizers.") or dotted(node.func).endswith(_WRAPPERS)
    return any(
        isinstance(value, cst.Call) and is_optimizer(code, value) for value in code.values(node)
    )


def compile_keyword(code: Code) -> Iterator[Finding]:
    """`compile(experimental_run_tf_function=False)`."""
    for call in code.calls if applies(code) else ():
        arg = argument(call, "experimental_run_tf_function")
        if arg is not None and dotted(call.func).endswith("compile"):
            yield code.finding(
                arg,
                "Keras 3's compile does not take experimental_run_tf_function: its optimizer "
                "averages without it",
                *without_arguments(code, call, arg),
            )


def generators(code: Code) -> Iterator[Finding]:
    """`fit_generator` and its like, and arguments of `fit` that went to the dataset."""
    for call in code.calls if applies(code) else ():
        if not isinstance(call.func, cst.Attribute):
            continue
        method = call.func.attr.value
        if method in _GENERATORS:
            yield _generator(code, call, call.func)
        elif method in _GENERATORS.values() and not code.imports("sklearn"):
            dropped = [arg for arg in call.args if arg.keyword and arg.keyword.value in _DROPPED]
            if dropped:
                yield code.finding(
                    call,
                    f"Keras 3's {method} does not take {_listed(dropped)}: a keras.utils.PyDataset "
                    "takes it",
                    *without_arguments(code, call, *dropped),
                )


def _generator(code: Code, call: cst.Call, func: cst.Attribute) -> Finding:
    old = func.attr.value
    new = _GENERATORS[old]
    why = f"Keras 3 has no {old}: {new} takes generators"
    dropped, edits = [], [code.replace(func.attr, new)]
    for index, arg in enumerate(call.args):
        if arg.star:
            return code.finding(call, f"{why}, and no {', '.join(_DROPPED[:3])}")
        if arg.keyword is None:
            if index >= len(_POSITIONS[old]):
                return code.finding(call, why)
            if index:
                start = code.start(arg)
                edits.append(Edit(start, start, f"{_POSITIONS[old][index]}="))
        elif arg.keyword.value in _DROPPED:
            dropped.append(arg)
        elif arg.keyword.value == "generator":
            edits.append(code.replace(arg.keyword, "x"))
    if dropped:
        why += f". It does not take {_listed(dropped)}: a keras.utils.PyDataset takes it"
    return code.finding(call, why, *edits, *without_arguments(code, call, *dropped))


def _listed(args: list[cst.Arg]) -> str:
    return ", ".join(arg.keyword.value for arg in args if arg.keyword is not None)


def optimizers(code: Code) -> Iterator[Finding]:
    """The arguments of optimizers: `lr=`, `decay=`; and `keras.optimizers.legacy`."""
    for call in code.calls:
        name = keras_name(code, call.func)
        if not name.startswith("keras.optimizers.") or ".schedules." in name:
            continue
        rate, decay = argument(call, "lr"), argument(call, "decay")
        if rate is not None and rate.keyword is not None:
            yield code.finding(
                call,
                "Keras's optimizers call it learning_rate. Keras 3 refuses lr=, the latest Keras 2 "
                "ignores it",
                code.replace(rate.keyword, "learning_rate"),
            )
        if not applies(code):
            continue
        if decay is not None and is_value(decay.value, "0", "0.0", "0.", "None"):
            yield code.finding(call, "Keras 3 ignores decay", *without_arguments(code, call, decay))
        elif decay is not None:
            yield code.finding(
                call,
                "Keras 3 ignores decay, so the learning rate would stay as it is. Write "
                "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, decay_steps=1, "
                "decay_rate=...)",
            )


def legacy_optimizers(code: Code) -> Iterator[Finding]:
    """`keras.optimizers.legacy.Adam`."""
    for node in code.all(cst.Attribute) if applies(code) else ():
        inner = node.value
        if (
            isinstance(inner, cst.Attribute)
            and inner.attr.value == "legacy"
            and keras_name(code, inner) == "keras.optimizers.legacy"
            and code.around(node, cst.ImportFrom) is None
        ):
            yield code.finding(
                node,
                "Keras 3 has no legacy optimizers: keras.optimizers has the same ones",
                code.replace(inner, code.source(inner.value)),
            )


def attributes(code: Code) -> Iterator[Finding]:
    """`optimizer.lr`, and `optimizer.variables()`."""
    for node in code.all(cst.Attribute) if applies(code) else ():
        if node.attr.value == "lr" and is_optimizer(code, node.value):
            yield code.finding(
                node,
                "Keras 3's optimizers call it learning_rate; setting lr would change nothing, "
                "without an error",
                code.replace(node.attr, "learning_rate"),
            )
    for call in code.calls if applies(code) else ():
        func = call.func
        if (
            isinstance(func, cst.Attribute)
            and func.attr.value in ("variables", "weights")
            and not call.args
            and is_optimizer(code, func.value)
        ):
            yield code.finding(
                call,
                f"An optimizer's {func.attr.value} is a list in Keras 3, not a method",
                code.replace(call, code.source(func)),
            )


def backend_values(code: Code) -> Iterator[Finding]:
    """`K.set_value` and `K.get_value`."""
    if not applies(code):
        return
    for call in code.calls:
        name = keras_name(code, call.func)
        if name == "keras.backend.set_value" and len(call.args) == 2:
            target, value = (code.source(arg.value) for arg in call.args)
            rate = _learning_rate(code, call.args[0].value)
            statement = code.statement(call)
            if rate and statement is not None and code.source(statement) == code.source(call):
                new = f"{rate} = {value}"
            else:
                new = f"{target}.assign({value})"
            yield code.finding(
                call,
                f"Instead of set_value: {names.BACKEND['set_value'].now}",
                code.replace(call, new),
            )
        elif name == "keras.backend.get_value" and len(call.args) == 1:
            rate = _learning_rate(code, call.args[0].value)
            new = f"{rate or code.source(call.args[0].value)}.numpy()"
            yield code.finding(
                call,
                f"Instead of get_value: {names.BACKEND['get_value'].now}",
                code.replace(call, f"float({new})" if rate else new),
            )


def _learning_rate(code: Code, node: cst.BaseExpression) -> str:
    """The text for an optimizer's learning rate, if an expression is one; otherwise ""."""
    if isinstance(node, cst.Attribute) and node.attr.value in ("lr", "learning_rate"):
        return f"{code.source(node.value)}.learning_rate"
    return ""


def backend_functions(code: Code) -> Iterator[Finding]:
    """Functions of `keras.backend` that only `tf.keras` has kept."""
    kept = {
        *("epsilon", "floatx", "set_floatx", "set_epsilon", "image_data_format", "backend"),
        *("set_image_data_format", "clear_session", "get_uid", "is_keras_tensor"),
        *("set_value", "get_value", "set_session", "get_session", "is_float_dtype"),
        *("is_int_dtype", "result_type", "standardize_dtype"),
    }
    seen: set[str] = set()
    for node in code.all(cst.Attribute) if applies(code) else ():
        found = next((n for n in code.names(node) if n.startswith("keras.backend.")), "")
        function = found.removeprefix("keras.backend.")
        if function and "." not in function and function not in kept | seen:
            seen.add(function)
            yield code.finding(
                node,
                f"Keras 3's keras.backend has no {function}: use keras.ops, or import the backend "
                "with `from tensorflow.keras import backend`",
            )


def modules(code: Code) -> Iterator[Finding]:
    """Imports of modules that Keras 3 has moved."""
    for node in code.all(cst.ImportFrom) if applies(code) else ():
        if node.module is None or isinstance(node.names, cst.ImportStar):
            continue
        module = dotted(node.module)
        before = "tensorflow." if module.startswith("tensorflow.") else ""
        short = module.removeprefix("tensorflow.")
        imported = [dotted(alias.name) for alias in node.names]
        if short in names.MODULES:
            home = before + names.MODULES[short]
            yield code.finding(node, f"Keras 3 has this in {home}", code.replace(node.module, home))
        elif not before and set(imported) & set(names.ONLY_IN_TF_KERAS.get(short, ())):
            yield code.finding(
                node,
                f"The package keras has lost {', '.join(imported)}; tf.keras still has it",
                code.replace(node.module, f"tensorflow.{module}"),
            )
        elif f"{short}.{imported[0]}" in names.ONLY_IN_TF_KERAS and not before:
            yield code.finding(
                node,
                f"The package keras has lost much of {imported[0]}; tf.keras still has it",
                code.replace(node.module, f"tensorflow.{module}"),
            )
        elif imported == ["np_utils"] and short == "keras.utils":
            yield _np_utils(code, node, before)


def _np_utils(code: Code, node: cst.ImportFrom, before: str) -> Finding:
    uses = [
        use
        for use in code.all(cst.Attribute)
        if isinstance(use.value, cst.Name) and use.value.value == "np_utils"
    ]
    edits = [code.replace(use, use.attr.value) for use in uses]
    functions = ", ".join(sorted({use.attr.value for use in uses}))
    if not functions:
        return code.finding(node, "Keras 3 has the functions of np_utils in keras.utils")
    new = f"from {before}keras.utils import {functions}"
    return code.finding(
        node,
        "Keras 3 has the functions of np_utils in keras.utils",
        code.replace(node, new),
        *edits,
    )


def other_methods(code: Code) -> Iterator[Finding]:
    """Methods of models that Keras 3 does not have, and files that it does not write."""
    for call in code.calls if applies(code) else ():
        if not isinstance(call.func, cst.Attribute):
            continue
        method = call.func.attr.value
        if method in ("predict_classes", "predict_proba") and not code.imports("sklearn"):
            target, args = (
                code.source(call.func.value),
                code.text[code.end(call.func) : code.end(call)],
            )
            tail = ".argmax(axis=-1)" if method == "predict_classes" else ""
            yield code.finding(
                call,
                f"Keras 3 has no {method}: {names.ATTRIBUTES[method].now}",
                code.replace(call, f"{target}.predict{args}{tail}"),
            )
        saved = argument(call, "save_format")
        if saved is not None:
            yield code.finding(
                call,
                "Keras 3's save takes the format from the file's name: .keras or .h5. For a "
                f"SavedModel call model.export(...), without {code.source(saved)}",
            )


def returned_weights(code: Code) -> Iterator[Finding]:
    """`optimizer.get_weights()` and `optimizer.set_weights(...)`."""
    for node in walk(code.module) if applies(code) else ():
        if (
            isinstance(node, cst.Attribute)
            and node.attr.value in ("get_weights", "set_weights")
            and is_optimizer(code, node.value)
        ):
            now = names.ATTRIBUTES[node.attr.value].now
            yield code.finding(node, f"Keras 3's optimizers have no {node.attr.value}: {now}")


def losses(code: Code) -> Iterator[Finding]:
    """Losses that `tf.keras` and the package `keras` each have under one of their names."""
    if not applies(code):
        return
    for node in code.all(cst.Attribute):
        for full in code.names(node):
            module, _, old = full.rpartition(".")
            if new := names.loss(module, old):
                yield code.finding(node, _renamed(module, old, new), code.replace(node.attr, new))
    for imported in code.all(cst.ImportFrom):
        if imported.module is None or isinstance(imported.names, cst.ImportStar):
            continue
        module = dotted(imported.module)
        for alias in imported.names:
            old = dotted(alias.name)
            if new := names.loss(module, old):
                text = new if alias.asname is not None else f"{new} as {old}"
                why = _renamed(module, old, new)
                yield code.finding(imported, why, code.replace(alias.name, text))


def _renamed(module: str, old: str, new: str) -> str:
    return f"Keras 3's {module} has no {old}: it is called {new}"
