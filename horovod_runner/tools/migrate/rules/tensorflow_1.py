"""Sessions and names of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.rule import on, rule
from horovod_runner.worker import old_keras_names as names

_CONFIG = tree.named("tensorflow.ConfigProto", "tensorflow.compat.v1.ConfigProto")
_SESSION = tree.named("tensorflow.Session", "tensorflow.compat.v1.Session")
_SET_SESSION = m.Call(
    tree.named(
        "keras.backend.set_session",
        "tensorflow.keras.backend.set_session",
        "tensorflow.compat.v1.keras.backend.set_session",
    )
)
_IN_SESSIONS = ("Session", "ConfigProto", "GPUOptions")
_WHY = (
    "TensorFlow 2 has no sessions: tf.config says which GPUs a process sees, and how it uses their "
    "memory"
)
_THREADS = ("inter_op_parallelism_threads", "intra_op_parallelism_threads")
_GPU = "gpu_options.visible_device_list"
_UNDERSTOOD = {_GPU, "gpu_options.allow_growth", "device_count", *_THREADS}
_UNDERSTOOD |= {"allow_soft_placement", "log_device_placement"}  # and not needed


def _uses_no_compat(code: Code) -> bool:
    return code.imports("tensorflow") and not code.imports("tensorflow.compat.v1")


@on(_SET_SESSION, when=lambda code: code.imports("tensorflow"))
def _set_session(code: Code, call: cst.Call) -> OldCode:
    """A ConfigProto, its settings, and the session of Keras that is made of it."""
    told = OldCode(call, f"{_WHY}. Write what this session sets with tf.config")
    statement: Any = code.statement(call)
    is_statement = statement is not None and isinstance(code.parent(call), cst.Expr)
    if not is_statement or len(call.args) != 1:
        return told
    session: Any = call.args[0].value
    if not code.matches(session, m.Call(_SESSION)):
        return told
    config, used = tree.argument(session, "config"), list[Any]()
    said: dict[str, cst.BaseExpression] = {}
    if config is not None:
        made: Any = config.value
        if isinstance(made, cst.Name):
            used = _configured(code, statement, made.value)
            made = used[0].body[0].value if used else made
        if not code.matches(made, m.Call(_CONFIG)):
            return told
        said = {arg.keyword.value if arg.keyword else "": arg.value for arg in made.args}
        for line in used[1:]:
            name = tree.dotted(line.body[0].targets[0].target).partition(".")[2]
            said[name] = line.body[0].value
    tf = tree.dotted(session.func).rpartition(".")[0].removesuffix(".compat.v1") or "tf"
    lines, removals = _lines(code, tf, said), code.removes(*used, statement)
    if lines is None or removals is None:
        return told
    new = {statement: tree.instead(*lines)} if lines else {}
    return OldCode(statement, _WHY, removals | new)


def _lines(code: Code, tf: str, said: dict[str, cst.BaseExpression]) -> list[str] | None:
    """The lines with tf.config for a ConfigProto; None if a setting of it is not known."""
    if not said.keys() <= _UNDERSTOOD:
        return None
    texts = {name: code.source(value) for name, value in said.items()}
    gpus = texts.get("device_count", "")
    number = tree.string(said.get(_GPU)) or ""
    if m.matches(said.get(_GPU, cst.Pass()), m.Call(m.Name("str"), [m.Arg()])):
        number = texts[_GPU].removeprefix("str(").removesuffix(")")
    elif _GPU in said and not number.isdigit():
        return None
    lines, grows = [], texts.get("gpu_options.allow_growth") == "True"
    if gpus:
        if gpus.replace("'", '"').replace(" ", "") != '{"GPU":0}':
            return None
        lines.append(f'{tf}.config.set_visible_devices([], "GPU")')
    elif grows or number:
        lines.append(f'gpus = {tf}.config.list_physical_devices("GPU")')
        if grows:
            memory = f"{tf}.config.experimental.set_memory_growth(gpu, True)"
            lines += ["for gpu in gpus:", f"    {memory}"]
        if number:
            visible = f'{tf}.config.set_visible_devices(gpus[{number}], "GPU")'
            lines += ["if gpus:", f"    {visible}"]
    threads = [name for name in texts if name in _THREADS]
    return lines + [f"{tf}.config.threading.set_{name}({texts[name]})" for name in threads]


def _configured(code: Code, statement: Any, name: str) -> list[Any]:
    """The lines above a statement that make a configuration and set it; [] if more is done."""
    block = code.parent(statement)
    lines: list[Any] = []
    for line in block.body[: block.body.index(statement)]:
        if m.matches(line, m.SimpleStatementLine([m.Assign()])):
            target = tree.dotted(line.body[0].targets[0].target)
            if target == name:
                lines = [line]
            elif target.startswith(f"{name}.") and lines:
                lines.append(line)
    # It is used once in each of these lines, and once in the session.
    return lines if len(list(code.uses(name, block))) == len(lines) + 1 else []


@on(m.Attribute(), when=_uses_no_compat)
def _renamed(code: Code, node: cst.Attribute) -> OldCode | None:
    """`tf.log`, and other functions with another name in TensorFlow 2."""
    name = code.name(node, "tensorflow")
    if name not in names.TENSORFLOW:
        return None
    new = f"{code.source(node.value)}.{names.TENSORFLOW[name]}"
    return OldCode(node, f"TensorFlow 2 calls tf.{name} {new}", {node: tree.becomes(new)})


@rule
def _graphs(code: Code) -> Iterator[OldCode]:
    """Names of TensorFlow 1 for graphs and sessions, all in one finding."""
    if not _uses_no_compat(code):
        return
    known = _IN_SESSIONS if any(True for _ in code.found(_SET_SESSION)) else ()
    found: dict[str, cst.CSTNode] = {}
    for node in code.all(cst.Attribute):
        name = code.name(node, "tensorflow")
        if name in names.GRAPH and name not in known:
            found.setdefault(name, node)
    if found:
        listed = ", ".join(f"tf.{name}" for name in found)
        yield OldCode(
            min(found.values(), key=code.line),
            f"TensorFlow 1's names: {listed}. Write it with TensorFlow 2; or keep the graph, with "
            "`import tensorflow.compat.v1 as tf`, tf.disable_v2_behavior() before all else, and "
            'env={"TF_USE_LEGACY_KERAS": "1"} for tf.layers and tf.keras',
        )
    for node in code.all(cst.Attribute):
        if code.name(node, "keras", "tensorflow.keras") == "backend.get_session":
            yield OldCode(node, f"Instead of get_session: {names.BACKEND['get_session'].now}")
            return
