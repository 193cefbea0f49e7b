"""Sessions and names of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from horovod_runner.migrate import names
from horovod_runner.migrate.code import Code, argument, dotted, is_value, string
from horovod_runner.migrate.edits import Finding

_CONFIG = frozenset({"tensorflow.ConfigProto", "tensorflow.compat.v1.ConfigProto"})
_SESSION = frozenset({"tensorflow.Session", "tensorflow.compat.v1.Session"})
_SETS_SESSION = frozenset(
    {
        "keras.backend.set_session",
        "tensorflow.keras.backend.set_session",
        "tensorflow.compat.v1.keras.backend.set_session",
    }
)
_IN_SESSIONS = ("Session", "ConfigProto", "GPUOptions")
_WHY = (
    "TensorFlow 2 has no sessions: tf.config says which GPUs a process sees, and how it uses their "
    "memory"
)
_THREADS = ("inter_op_parallelism_threads", "intra_op_parallelism_threads")


@dataclass
class _Settings:
    """What a ConfigProto says."""

    grow: bool = False
    gpu: str | None = None  # the expression for the one GPU that is seen
    hide_gpus: bool = False
    threads: dict[str, str] = field(default_factory=dict)

    def lines(self, tf: str) -> list[str]:
        """The same with tf.config."""
        lines = []
        if self.hide_gpus:
            lines.append(f'{tf}.config.set_visible_devices([], "GPU")')
        elif self.grow or self.gpu is not None:
            lines.append(f'gpus = {tf}.config.list_physical_devices("GPU")')
            if self.grow:
                lines += [
                    "for gpu in gpus:",
                    f"    {tf}.config.experimental.set_memory_growth(gpu, True)",
                ]
            if self.gpu is not None:
                visible = f'{tf}.config.set_visible_devices(gpus[{self.gpu}], "GPU")'
                lines += ["if gpus:", f"    {visible}"]
        for name, value in self.threads.items():
            lines.append(f"{tf}.config.threading.set_{name}({value})")
        return lines


def sessions(code: Code) -> Iterator[Finding]:
    """A ConfigProto, its settings, and the session of Keras that is made of it."""
    if not code.imports("tensorflow"):
        return
    for call in code.calls:
        if not code.names(call.func) & _SETS_SESSION:
            continue
        found = _session(code, call)
        yield found or code.finding(call, f"{_WHY}. Write what this session sets with tf.config")


def _session(code: Code, call: cst.Call) -> Finding | None:
    """The finding that replaces a session and its configuration; None if there is more to it."""
    statement = code.statement(call)
    session = call.args[0].value if len(call.args) == 1 else None
    if statement is None or not isinstance(session, cst.Call) or len(statement.body) > 1:
        return None
    if not isinstance(statement.body[0], cst.Expr) or not _SESSION & code.names(session.func):
        return None
    read = _read(code, statement, argument(session, "config"))
    if read is None:
        return None
    settings, used = read
    edits = [code.remove(line) for line in used]
    tf = dotted(session.func).rpartition(".")[0].removesuffix(".compat.v1") or "tf"
    lines = settings.lines(tf)
    if lines:
        edits.append(code.replace(statement, f"\n{code.indent(statement)}".join(lines)))
    else:
        edits.append(code.remove(statement))
    known = [edit for edit in edits if edit is not None]
    return code.finding(statement, _WHY, *known) if len(known) == len(edits) else None


def _read(
    code: Code, statement: cst.SimpleStatementLine, config: cst.Arg | None
) -> tuple[_Settings, list[cst.SimpleStatementLine]] | None:
    """What a configuration says, and the statements that say it; None if not all is understood."""
    settings = _Settings()
    if config is None:
        return settings, []
    made, used = config.value, list[cst.SimpleStatementLine]()
    if isinstance(made, cst.Name):
        configured = _configured(code, statement, made.value)
        if configured is None:
            return None
        made, used = configured
    understood = all(_read_setting(code, line, settings) for line in used[1:])
    if understood and isinstance(made, cst.Call) and _read_arguments(code, made, settings):
        return settings, used
    return None


def _configured(
    code: Code, statement: cst.SimpleStatementLine, name: str
) -> tuple[cst.Call, list[cst.SimpleStatementLine]] | None:
    """The call that makes a configuration, and the statements of the block that use it."""
    block = code.parent(statement)
    if not isinstance(block, cst.IndentedBlock | cst.Module):
        return None
    lines: list[cst.SimpleStatementLine] = []
    made = None
    for line in block.body:
        if line is statement:
            break
        if not isinstance(line, cst.SimpleStatementLine):
            continue
        first = line.body[0]
        if not isinstance(first, cst.Assign) or len(line.body) > 1:
            continue
        target = dotted(first.targets[0].target)
        if target == name:
            made, lines = first.value, [line]
        elif target.startswith(f"{name}."):
            lines.append(line)
    if not isinstance(made, cst.Call) or not _CONFIG & code.names(made.func):
        return None
    inside = len(list(code.uses(name, block)))
    # Once in each of these lines, and once in the session.
    return (made, lines) if inside == len(lines) + 1 else None


def _read_setting(code: Code, line: cst.SimpleStatementLine, settings: _Settings) -> bool:
    """Read `config.gpu_options.allow_growth = True`; returns whether it is understood."""
    assign = line.body[0]
    if not isinstance(assign, cst.Assign):
        return False
    name = dotted(assign.targets[0].target).partition(".")[2]
    value = assign.value
    if name == "gpu_options.allow_growth":
        settings.grow = is_value(value, "True")
    elif name == "gpu_options.visible_device_list":
        inner = value.args[0].value if isinstance(value, cst.Call) and value.args else None
        if inner is not None and isinstance(value, cst.Call) and dotted(value.func) == "str":
            settings.gpu = code.source(inner)
        elif (text := string(value)) is not None and text.isdigit():
            settings.gpu = text
        else:
            return False
    elif name in _THREADS:
        settings.threads[name] = code.source(value)
    else:
        return name in ("allow_soft_placement", "log_device_placement")
    return True


def _read_arguments(code: Code, call: cst.Call, settings: _Settings) -> bool:
    """Read the arguments of ConfigProto; returns whether all are understood."""
    for arg in call.args:
        name = "" if arg.keyword is None else arg.keyword.value
        if name in _THREADS:
            settings.threads[name] = code.source(arg.value)
        elif name == "device_count":
            if code.source(arg.value).replace("'", '"').replace(" ", "") != '{"GPU":0}':
                return False
            settings.hide_gpus = True
        elif name not in ("allow_soft_placement", "log_device_placement"):
            return False
    return True


def renamed(code: Code) -> Iterator[Finding]:
    """`tf.log`, and other functions with another name in TensorFlow 2."""
    if not code.imports("tensorflow") or code.imports("tensorflow.compat.v1"):
        return
    for node in code.all(cst.Attribute):
        name = _name(code, node)
        if name in names.TENSORFLOW:
            new = f"{code.source(node.value)}.{names.TENSORFLOW[name]}"
            yield code.finding(node, f"TensorFlow 2 calls tf.{name} {new}", code.replace(node, new))


def graphs(code: Code) -> Iterator[Finding]:
    """Names of TensorFlow 1 for graphs and sessions, all in one finding."""
    if not code.imports("tensorflow") or code.imports("tensorflow.compat.v1"):
        return
    known = set(_IN_SESSIONS) if any(sessions(code)) else set()
    lines: dict[str, int] = {}
    for node in code.all(cst.Attribute):
        name = _name(code, node)
        if name in names.GRAPH and name not in known:
            lines.setdefault(name, code.line(node))
    if lines:
        listed = ", ".join(f"tf.{name}" for name in lines)
        yield Finding(
            min(lines.values()),
            f"TensorFlow 1's names: {listed}. Write it with TensorFlow 2; or keep the graph, with "
            "`import tensorflow.compat.v1 as tf`, tf.disable_v2_behavior() before all else, and "
            'env={"TF_USE_LEGACY_KERAS": "1"} for tf.layers and tf.keras',
        )
    for node in code.all(cst.Attribute):
        if code.name(node) in ("keras.backend.get_session", "tensorflow.keras.backend.get_session"):
            yield code.finding(node, f"Instead of get_session: {names.BACKEND['get_session'].now}")
            return


def _name(code: Code, node: cst.CSTNode) -> str:
    """The name that something has in TensorFlow; "" for others."""
    return next(
        (
            name.removeprefix("tensorflow.")
            for name in code.names(node)
            if name.startswith("tensorflow.")
        ),
        "",
    )
