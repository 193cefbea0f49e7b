"""Calls, attributes and imports of Keras 2 that Keras 3 does not have."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst import helpers

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.imports import uses_keras_2
from horovod_runner.tools.migrate.rules.rule import fix, on, rule
from horovod_runner.worker import old_keras_names as names

# Positional arguments, in order; the first is called x today.
_GENERATORS = {
    "fit_generator": (
        *("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
        *("validation_steps", "validation_freq", "class_weight"),
    ),
    "evaluate_generator": ("x", "steps", "callbacks"),
    "predict_generator": ("x", "steps", "callbacks"),
}
_DROPPED = ("workers", "use_multiprocessing", "max_queue_size", "pickle_safe", "max_q_size")
_WRAPPERS = ("DistributedOptimizer", "LossScaleOptimizer")
# Functions of keras.backend that the package keras has kept, or that other rules are about.
_KEPT = frozenset(
    {
        *("epsilon", "floatx", "set_floatx", "set_epsilon", "image_data_format", "backend"),
        *("set_image_data_format", "clear_session", "get_uid", "is_keras_tensor"),
        *("set_value", "get_value", "set_session", "get_session", "is_float_dtype"),
        *("is_int_dtype", "result_type", "standardize_dtype"),
    }
)
_RATE = tree.method("lr", "learning_rate")
# An expression that may be computed twice: names, numbers, products, hvd.size().
_PLAIN = re.compile(r"[\w.*/ ]+(\(\))?[\w.*/ ]*")


def applies(code: Code) -> bool:
    """Whether the text uses Keras, and does not say that it is Keras 2."""
    return code.imports("keras", "tensorflow") and not uses_keras_2(code)


def _applies_here(code: Code) -> bool:
    return applies(code) and not code.imports("sklearn")  # whose methods have the same names


def _is_optimizer_class(code: Code, node: cst.CSTNode) -> bool:
    name = code.name(node, "keras", "tensorflow.keras", "tensorflow")
    return name.startswith("optimizers.") and ".schedules." not in name


def is_optimizer(code: Code, node: cst.CSTNode) -> bool:
    """Whether an expression is an optimizer of Keras, as far as the text says."""
    if isinstance(node, cst.Attribute):
        return node.attr.value == "optimizer" and not code.imports("torch")
    if isinstance(node, cst.Call):
        return _is_optimizer_class(code, node.func) or tree.dotted(node.func).endswith(_WRAPPERS)
    return any(isinstance(v, cst.Call) and is_optimizer(code, v) for v in code.values(node))


# Calls of models


@on(m.Call(tree.ending("compile")), when=applies)
def _compile(_code: Code, call: cst.Call) -> OldCode | None:
    arg = tree.argument(call, "experimental_run_tf_function")
    why = (
        "Keras 3's compile does not take experimental_run_tf_function: its optimizer averages "
        "without it"
    )
    return OldCode(arg, why, {call: tree.without(call, arg)}) if arg else None


@on(m.Call(tree.method(*_GENERATORS)), when=applies)
def _generator(_code: Code, call: cst.Call) -> OldCode:
    func = cst.ensure_type(call.func, cst.Attribute).attr
    new, positions = func.value.removesuffix("_generator"), _GENERATORS[func.value]
    why = f"Keras 3 has no {func.value}: {new} takes generators"
    if any(arg.star for arg in call.args):
        return OldCode(call, f"{why}, and no {', '.join(_DROPPED[:3])}")
    by_position = [arg for arg in call.args if arg.keyword is None]
    if len(by_position) > len(positions):
        return OldCode(call, why)
    dropped = [arg for arg in call.args if arg.keyword and arg.keyword.value in _DROPPED]
    if dropped:
        why += f". It does not take {_listed(dropped)}: a keras.utils.PyDataset takes it"
    changes: tree.Changes = {func: tree.becomes(new), call: tree.without(call, *dropped)}
    if generator := tree.argument(call, "generator"):
        changes[generator] = tree.with_keyword("x")
    for arg, name in zip(by_position[1:], positions[1:], strict=False):
        changes[arg] = tree.with_keyword(name)
    return OldCode(call, why, changes)


def _listed(args: list[cst.Arg]) -> str:
    return ", ".join(arg.keyword.value for arg in args if arg.keyword is not None)


@on(m.Call(tree.method("fit", "evaluate", "predict")), when=_applies_here)
def _dropped(_code: Code, call: cst.Call) -> OldCode | None:
    dropped = [arg for arg in call.args if arg.keyword and arg.keyword.value in _DROPPED]
    why = (
        f"Keras 3's {cst.ensure_type(call.func, cst.Attribute).attr.value} does not take "
        f"{_listed(dropped)}: a keras.utils.PyDataset takes it"
    )
    return OldCode(call, why, {call: tree.without(call, *dropped)}) if dropped else None


def _predict(call: Any) -> Any:
    return call.with_deep_changes(call.func, attr=cst.Name("predict"))


def _argmax(call: Any) -> Any:
    return helpers.parse_template_expression("{it}.argmax(axis=-1)", it=_predict(call))


@on(m.Call(tree.method("predict_classes")), when=_applies_here)
def _predict_classes(code: Code, call: cst.Call) -> OldCode:
    why = f"Keras 3 has no predict_classes: {names.ATTRIBUTES['predict_classes'].now}"
    layers = code.found(m.Call(tree.ending(".Dense")))
    # The argmax of one output is always 0.
    of_one = any(tree.is_value(tree.argument(layer, "units", 0), "1") for layer in layers)
    return OldCode(call, why, {} if of_one else {call: _argmax})


fix(
    m.Call(tree.method("predict_proba")),
    f"Keras 3 has no predict_proba: {names.ATTRIBUTES['predict_proba'].now}",
    _predict,
    when=_applies_here,
)


@on(m.Call(m.Attribute()), when=applies)
def _save_format(code: Code, call: cst.Call) -> OldCode | None:
    saved = tree.argument(call, "save_format")
    if saved is None:
        return None
    why = (
        "Keras 3's save takes the format from the file's name: .keras or .h5. For a SavedModel "
        f"call model.export(...), without save_format={code.source(saved.value)}"
    )
    return OldCode(call, why)


# Optimizers


@on(m.Call())
def _learning_rate(code: Code, call: cst.Call) -> OldCode | None:
    rate = tree.argument(call, "lr")
    if rate is None or not _is_optimizer_class(code, call.func):
        return None
    why = (
        "Keras's optimizers call it learning_rate. Keras 3 refuses lr=, the latest Keras 2 ignores "
        "it"
    )
    return OldCode(call, why, {rate.keyword: tree.becomes("learning_rate")})


@on(m.Call(), when=applies)
def _decay(code: Code, call: cst.Call) -> OldCode | None:
    decay = tree.argument(call, "decay")
    if decay is None or not _is_optimizer_class(code, call.func):
        return None
    if tree.is_value(decay, "0", "0.0", "0.", "None"):
        return OldCode(call, "Keras 3 ignores decay", {call: tree.without(call, decay)})
    return OldCode(
        call,
        "Keras 3 ignores decay, so the learning rate would stay as it is. Write "
        "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, decay_steps=1, "
        "decay_rate=...)",
    )


fix(
    m.Attribute(tree.named("keras.optimizers.legacy", "tensorflow.keras.optimizers.legacy")),
    "Keras 3 has no legacy optimizers: keras.optimizers has the same ones",
    lambda node: node.with_changes(value=node.value.value),
    when=applies,
    where=lambda code, node: (
        isinstance(node.value, cst.Attribute) and not code.around(node, cst.ImportFrom)
    ),
)


def _in_backend_value(code: Code, node: cst.CSTNode) -> bool:
    outer = code.parent(code.parent(node))
    return m.matches(outer, m.Call(tree.ending(".set_value", ".get_value")))


fix(
    tree.method("lr"),
    "Keras 3's optimizers call it learning_rate; setting lr would change nothing, without an error",
    lambda node: node.with_changes(attr=cst.Name("learning_rate")),
    when=applies,
    where=lambda code, node: is_optimizer(code, node.value) and not _in_backend_value(code, node),
)
for _list in ("variables", "weights"):
    fix(
        m.Call(tree.method(_list), args=[]),
        f"An optimizer's {_list} is a list in Keras 3, not a method",
        lambda call: call.func,
        when=applies,
        where=lambda code, call: is_optimizer(code, call.func.value),
    )
for _old in ("get_weights", "set_weights"):
    fix(
        tree.method(_old),
        f"Keras 3's optimizers have no {_old}: {names.ATTRIBUTES[_old].now}",
        when=applies,
        where=lambda code, node: is_optimizer(code, node.value),
    )


# keras.backend


@on(m.Call(args=[m.Arg(), m.Arg()]), m.Call(args=[m.Arg()]), when=applies)
def _backend_value(code: Code, call: cst.Call) -> OldCode | None:
    name = code.name(call.func, "keras.backend", "tensorflow.keras.backend")
    if (name, len(call.args)) not in (("set_value", 2), ("get_value", 1)):
        return None
    is_rate, line = m.matches(call.args[0].value, _RATE), code.parent(call)
    assigns = name == "set_value" and is_rate and isinstance(line, cst.Expr)

    def change(node: Any) -> Any:
        args = (node.value if assigns else node).args
        variable, *values = (code.source(arg.value) for arg in args)
        if is_rate:
            variable = f"{code.source(args[0].value.value)}.learning_rate"
        if assigns:
            target = cst.AssignTarget(tree.expression(variable))
            return cst.Assign([target], tree.expression(values[0]))
        if values:
            return tree.expression(f"{variable}.assign({values[0]})")
        return tree.expression(f"float({variable}.numpy())" if is_rate else f"{variable}.numpy()")

    place = line if assigns else call
    return OldCode(call, f"Instead of {name}: {names.BACKEND[name].now}", {place: change})


@rule
def _backend_functions(code: Code) -> list[OldCode]:
    """Functions of `keras.backend` that only `tf.keras` has kept."""
    found: dict[str, cst.CSTNode] = {}
    for node in code.all(cst.Attribute) if applies(code) else ():
        function = code.name(node, "keras.backend")
        if function and "." not in function and function not in _KEPT:
            found.setdefault(function, node)
    return [
        OldCode(
            node,
            f"Keras 3's keras.backend has no {function}: use keras.ops, or import the backend with "
            "`from tensorflow.keras import backend`",
        )
        for function, node in found.items()
    ]


# Imports and names


@on(m.ImportFrom(relative=[]), when=applies)
def _moved(code: Code, node: cst.ImportFrom) -> OldCode | None:
    module, first = tree.dotted(node.module), tree.imports_of(node)[0].rpartition(".")[2]
    short = module.removeprefix("tensorflow.")
    package = module.removesuffix(short)
    imported = {name.rpartition(".")[2] for name in tree.imports_of(node)}
    if short in names.MODULES:
        home = package + names.MODULES[short]
        why = f"Keras 3 has this in {home}"
    elif not package and imported & {*names.ONLY_IN_TF_KERAS.get(short, ())}:
        home = f"tensorflow.{module}"
        listed = ", ".join(name.rpartition(".")[2] for name in tree.imports_of(node))
        why = f"The package keras has lost {listed}; tf.keras still has it"
    elif not package and f"{short}.{first}" in names.ONLY_IN_TF_KERAS:
        home = f"tensorflow.{module}"
        why = f"The package keras has lost much of {first}; tf.keras still has it"
    else:
        return _np_utils(code, node) if (short, imported) == ("keras.utils", {"np_utils"}) else None
    return OldCode(node, why, {node.module: tree.becomes(home)})


def _np_utils(code: Code, node: cst.ImportFrom) -> OldCode:
    uses = list(code.found(m.Attribute(m.Name("np_utils"))))
    functions = sorted({use.attr.value for use in uses})
    changes: tree.Changes = {use: tree.becomes(use.attr.value) for use in uses}
    if functions:
        aliases = [cst.ImportAlias(cst.Name(name)) for name in functions]
        changes[node] = lambda node: node.with_changes(names=aliases, lpar=None, rpar=None)
    return OldCode(node, "Keras 3 has the functions of np_utils in keras.utils", changes)


@on(m.Attribute(), when=applies)
def _loss(code: Code, node: cst.Attribute) -> OldCode | None:
    for name in sorted(code.names(node)):
        module, _, old = name.rpartition(".")
        if new := names.loss(module, old):
            return OldCode(node, _renamed(module, old, new), {node.attr: tree.becomes(new)})
    return None


@on(m.ImportAlias(), when=applies)
def _imported_loss(code: Code, alias: cst.ImportAlias) -> OldCode | None:
    module, old = tree.dotted(getattr(code.parent(alias), "module", None)), tree.dotted(alias.name)
    new = names.loss(module, old)
    if not new:
        return None
    asname = alias.asname or cst.AsName(cst.Name(old))
    change = {alias: lambda alias: alias.with_changes(name=cst.Name(new), asname=asname)}
    return OldCode(alias, _renamed(module, old, new), change)


def _renamed(module: str, old: str, new: str) -> str:
    return f"Keras 3's {module} has no {old}: it is called {new}"


# Callbacks and files


@on(m.Call(tree.ending(".ModelCheckpoint", ".save_weights")), when=applies)
def _file(code: Code, call: cst.Call) -> OldCode | None:
    path = tree.argument(call, "filepath", 0)
    weights = tree.dotted(call.func).endswith("save_weights") or tree.is_value(
        tree.argument(call, "save_weights_only"), "True"
    )
    endings = (".weights.h5",) if weights else (".keras", ".h5")
    literal = None if path is None else _last_text(code, path.value)
    if literal is None or literal.endswith(endings):
        return None
    stem = re.sub(r"\.(ckpt|hdf5|h5|tf|weights)$", "", literal)
    old = literal.removeprefix(stem)
    changes: tree.Changes = {}
    # An ending alone, as in run + ".h5", may belong to another file elsewhere.
    for text in code.all(cst.SimpleString) if stem and old else ():
        if tree.string(text) == literal:
            new = text.value.replace(old + text.quote, endings[0] + text.quote)
            changes[text] = tree.becomes(new)
    why = (
        f"Keras 3 writes {'weights' if weights else 'a model'} only to a file whose name ends with "
        f"{' or '.join(endings)}"
    )
    return OldCode(call, why, changes)


def _last_text(code: Code, node: cst.BaseExpression) -> str | None:
    """The literal that a path ends with; None if it ends with something else."""
    known: list[cst.BaseExpression] = []  # path = "/dbfs" + path
    while node not in known:
        known.append(node)
        if isinstance(node, cst.BinaryOperation):
            if not isinstance(node.operator, cst.Add | cst.Divide):
                return None
            node = node.right
        elif isinstance(node, cst.Call) and tree.dotted(node.func).endswith("join") and node.args:
            node = node.args[-1].value
        elif isinstance(node, cst.Name):
            values = code.values(node)
            if len(values) != 1:
                return None
            node = values[0]
        else:
            return tree.string(node)
    return None


fix(
    m.Call(tree.named("tensorflow.train.latest_checkpoint")),
    "latest_checkpoint finds TensorFlow's checkpoints alone, not the files of Keras 3: take the "
    "newest file of the folder, or use ReportCallback() and load_checkpoint()",
    when=applies,
)


@on(m.Call(tree.ending("callbacks.LearningRateWarmupCallback")))
def _warmup(code: Code, call: cst.Call) -> OldCode | None:
    """Without the learning rate, as before Horovod 0.21."""
    if tree.argument(call, "initial_lr", 0) or any(arg.star for arg in call.args):
        return None
    rates = {
        code.source(rate.value)
        for made in code.all(cst.Call)
        if is_optimizer(code, made) and code.unit(made) is code.unit(call)
        if (rate := tree.argument(made, "learning_rate") or tree.argument(made, "lr"))
    }
    text = rates.pop() if len(rates) == 1 else ""
    new = tree.with_argument(f"initial_lr={text}", first=True)
    why = "The callback needs initial_lr, the learning rate of the optimizer"
    return OldCode(call, why, {call: new} if _PLAIN.fullmatch(text) else {})
