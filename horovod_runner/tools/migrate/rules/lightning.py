"""Code for Lightning 1: arguments of the Trainer, and hooks that Lightning 2 refuses."""

from __future__ import annotations

from typing import Final

import libcst as cst
import libcst.matchers as m

from horovod_runner.tools.migrate import tree
from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules.rule import fix, on

_PACKAGES: Final = ("pytorch_lightning", "lightning")
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
_EPOCHS: Final = ("on_epoch_start", "on_epoch_end")


def _applies(code: Code) -> bool:
    return code.imports(*_PACKAGES)


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
    if tree.is_value(arg, "0", "None"):
        return OldCode(
            call, why, {arg.keyword: tree.becomes("accelerator"), arg.value: tree.becomes('"cpu"')}
        )
    changes: tree.Changes = {arg.keyword: tree.becomes("devices")}
    given = tree.argument(call, "accelerator")
    if given is None or tree.string(given.value) == "horovod":  # which becomes the strategy
        changes[call] = tree.with_argument('accelerator="gpu"')
    return OldCode(call, why, changes)


@on(m.Call(tree.ending("Trainer")), when=_applies)
def _renamed(code: Code, call: cst.Call) -> OldCode | None:
    changes: tree.Changes = {}
    reasons = []
    for old, new in _RENAMED.items():
        arg = tree.argument(call, old)
        if arg is not None:
            changes[arg.keyword] = tree.becomes(new)
            reasons.append(f"{old} is called {new}")
    if not changes:
        return None
    return OldCode(call, f"In Lightning 2 {' and '.join(reasons)}", changes)


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
for _name in _EPOCHS:
    fix(
        m.FunctionDef(name=m.Name(_name)),
        f"Lightning 2 does not call {_name}: write {_name.replace('on_', 'on_train_')}, and the "
        "same for validation",
        when=_applies,
    )
