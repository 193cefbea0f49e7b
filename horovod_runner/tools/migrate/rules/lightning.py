"""Code for Lightning 1: arguments of the Trainer, and hooks that Lightning 2 refuses."""

from __future__ import annotations

from typing import Any, Final

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.rule import fix, on

#: Arguments of the Trainer that Lightning 2 has under another name.
_RENAMED: Final = {
    "checkpoint_callback": "enable_checkpointing",
    "replace_sampler_ddp": "use_distributed_sampler",
    "terminate_on_nan": "detect_anomaly",
}
#: Those that it does not have, with what to do instead.
_DROPPED: Final = {
    "auto_select_gpus": "leave it out: a rank has its GPU already",
    "auto_lr_find": "use lightning.pytorch.tuner.Tuner(trainer).lr_find(model)",
    "auto_scale_batch_size": "use lightning.pytorch.tuner.Tuner(trainer).scale_batch_size(model)",
    "flush_logs_every_n_steps": "give it to the logger",
    "progress_bar_refresh_rate": "use callbacks=[TQDMProgressBar(refresh_rate=...)], or "
    "enable_progress_bar=False for 0",
    "resume_from_checkpoint": "use trainer.fit(model, ckpt_path=...)",
    "stochastic_weight_avg": "use callbacks=[StochasticWeightAveraging(...)]",
    "track_grad_norm": "log lightning.pytorch.utilities.grad_norm(self, 2) in "
    "on_before_optimizer_step",
    "weights_save_path": "use default_root_dir, or ModelCheckpoint(dirpath=...)",
    "weights_summary": "use enable_model_summary=True or False",
}
#: Kinds of expressions that say how many GPUs, or which.
_NUMBERS: Final = (cst.Integer, cst.UnaryOperation, cst.SimpleString, cst.List)


def _applies(code: Code) -> bool:
    return code.imports("pytorch_lightning", "lightning")


@on(m.Call(tree.ending("Trainer")))
def _lightning_strategy(code: Code, call: cst.Call) -> OldCode | None:
    for name in ("strategy", "accelerator", "distributed_backend"):
        arg = tree.argument(call, name)
        if arg is None or tree.string(arg.value) != "horovod":
            continue
        changes = {
            arg.keyword: tree.becomes("strategy"),
            arg.value: tree.becomes("HorovodStrategy()"),
        }
        statement = code.around(call, cst.SimpleStatementLine)
        if not code.is_bound(call, "HorovodStrategy") and statement is not None:
            line = "from horovod_runner.lightning import HorovodStrategy"
            changes[statement] = tree.before(line)
        why = "Lightning 2 has no strategy for Horovod: horovod_runner.lightning has"
        return OldCode(call, why, changes)
    return None


@on(m.Call(tree.ending("Trainer")), when=_applies)
def _gpus(code: Code, call: cst.Call) -> OldCode | None:
    arg = tree.argument(call, "gpus")
    if arg is None:
        return None
    why = (
        "Lightning 2 has no argument gpus: devices says how many GPUs, and accelerator of which "
        "kind. A rank of HorovodStrategy has one"
    )
    is_cpu = tree.is_value(arg, "0", "None")
    if tree.argument(call, "devices"):
        return OldCode(call, f"{why}. devices is given as well: keep the one that you mean")
    if any(each.star for each in call.args):
        return OldCode(call, f"{why}. Both may be among the arguments with a star, too")
    if not is_cpu and not isinstance(arg.value, _NUMBERS):
        return OldCode(
            call,
            f"{why}. Where gpus may be 0, write devices=gpus or 1 and "
            'accelerator="gpu" if gpus else "cpu"',
        )
    given = tree.argument(call, "accelerator")
    # The accelerator "horovod" becomes the strategy.
    is_chosen = given is not None and tree.string(given.value) != "horovod"
    changes: tree.Changes = {arg.keyword: tree.becomes("devices")}
    if is_cpu and is_chosen:
        changes = {call: tree.without(call, arg)}
    elif is_cpu:
        changes = {arg.keyword: tree.becomes("accelerator"), arg.value: tree.becomes('"cpu"')}
    elif not is_chosen:
        changes[call] = tree.with_argument('accelerator="gpu"')
    return OldCode(call, why, changes)


@on(m.Call(tree.ending("Trainer")), when=_applies)
def _renamed(code: Code, call: cst.Call) -> OldCode | None:
    changes: tree.Changes = {}
    reasons = []
    for old, new in _RENAMED.items():
        arg = tree.argument(call, old)
        if arg is not None and arg is not _callback(call):
            changes[arg.keyword] = tree.becomes(new)
            reasons.append(f"{old} is called {new}")
    if not changes:
        return None
    return OldCode(call, f"In Lightning 2 {' and '.join(reasons)}", changes)


def _callback(call: cst.Call) -> Any:
    """A checkpoint_callback that may be a ModelCheckpoint, which Lightning 1 took there too."""
    arg = tree.argument(call, "checkpoint_callback")
    return None if tree.is_value(arg, "True", "False", "None") else arg


@on(m.Call(tree.ending("Trainer")), when=_applies)
def _checkpoint_callback(_code: Code, call: cst.Call) -> OldCode | None:
    why = (
        "Lightning 2 has no argument checkpoint_callback: it takes a ModelCheckpoint among "
        "callbacks=[...], and True or False as enable_checkpointing"
    )
    return OldCode(call, why) if _callback(call) else None


@on(m.Call(tree.ending("Trainer")), when=_applies)
def _dropped(code: Code, call: cst.Call) -> OldCode | None:
    found = [name for name in tree.keywords(call) if name in _DROPPED]
    why = "; ".join(f"Lightning 2 has no argument {name}: {_DROPPED[name]}" for name in found)
    return OldCode(call, why) if found else None


for _step in ("training", "validation", "test", "predict"):
    fix(
        m.FunctionDef(name=m.Name(f"{_step}_epoch_end")),
        f"Lightning 2 refuses a module with {_step}_epoch_end: write "
        f"on_{'train' if _step == 'training' else _step}_epoch_end(self), without outputs. Let "
        f"{_step}_step put what it should get into a list of the module's, and clear the list "
        "there",
        when=_applies,
    )
for _name in ("on_epoch_start", "on_epoch_end"):
    fix(
        m.FunctionDef(name=m.Name(_name)),
        f"Lightning 2 does not call {_name}: write {_name.replace('on_', 'on_train_')}, and the "
        "same for validation",
        when=_applies,
    )
