"""Programs for Lightning, with HorovodStrategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle import torch_programs
from tests.oracle.programs import Program, lines

CHOICES: dict[str, dict[str, list[Any]]] = {
    "lightning": {
        "ranks": [2, 1, 3],
        "steps": [4, 3, 6],
        "optimizer": ["sgd", "momentum", "adam", "adamw", "rmsprop", "lbfgs"],
        "groups_of_weights": [1, 2],
        **torch_programs.NETWORK,
        "passes": [1, 2, 3],
        "clip": ["none", "norm", "value"],
        "schedule": ["none", "step", "cosine", "lambda"],
        "manual": [False, True],
        "losses": ["one", "penalty"],
        "changes": ["none", "freezes later"],
        "rows": ["equal", "uneven", "one row"],
        "seeds": ["by rank", "equal"],
        "restart": ["none"],
    }
}


#: Choices that do not go together with others: each with the programs in which it is left out.
EXCLUDED: list[tuple[str, Callable[[Program], bool]]] = [
    ("manual", lambda p: p.passes > 1 or p.clip != "none" or p.schedule != "none"),
    ("optimizer", lambda p: p.optimizer == "lbfgs" and (bool(p.manual) or p.passes > 1)),
    ("optimizer", lambda p: p.optimizer == "lbfgs" and (p.clip != "none" or p.changes != "none")),
    ("optimizer", lambda p: p.optimizer == "lbfgs" and p.groups_of_weights > 1),
    ("embedding", lambda p: p.optimizer == "lbfgs"),
    ("embedding", lambda p: p.embedding == "sparse" and (p.clip != "none" or p.optimizer != "sgd")),
    ("rows", lambda p: p.rows == "one row" and p.normalizes == "batch"),
    ("losses", lambda p: bool(p.convolution or p.ties)),
]


def source(program: Program) -> str:
    """See Program.source."""
    p = program
    return "\n\n\n".join([*torch_programs.common(p), _train(p), torch_programs.main(p)]) + "\n"


def _train(p: Program) -> str:
    clip = {
        "norm": 'gradient_clip_val=0.5, gradient_clip_algorithm="norm"',
        "value": 'gradient_clip_val=0.05, gradient_clip_algorithm="value"',
    }.get(p.clip)
    passes = p.passes > 1 and f"accumulate_grad_batches={p.passes}"
    options = "".join(f", {each}" for each in (clip, passes) if each)
    schedule = torch_programs.schedule(p)
    freezes = p.changes == "freezes later"
    plain = {
        "norm": "torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)",
        "value": "torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)",
    }.get(p.clip)
    return lines(
        torch_programs.REST,
        "\n",
        "def train(ranks, distributed, begin, end, state):",
        f"    torch.manual_seed({'ranks[0]' if p.seeds == 'by rank' else '0'})",
        "    plain = Network().double()",
        f"    optimizer = {torch_programs.optimizer(p, 'plain.parameters()')}",
        schedule and f"    schedule = torch.optim.lr_scheduler.{schedule}",
        "    if distributed:",
        f"        fit(ranks[0], plain, optimizer, {'schedule' if schedule else None}, end)",
        "    else:",
        "        for step in range(begin, end):",
        freezes
        and ["            if step == 2:", "                plain.first.requires_grad_(False)"],
        [
            "            def closure():",
            "                optimizer.zero_grad()",
            "                total = sum(loss_of(plain, r, step) for r in ranks) / len(ranks)",
            "                total.backward()",
            "                return total.detach()",
            "",
            "            optimizer.step(closure)",
        ]
        if p.optimizer == "lbfgs"
        else [
            "            for rank in ranks:",
            "                loss = loss_of(plain, rank, step) / len(ranks)",
            f"                (loss / {p.passes}).backward()",
            p.passes > 1
            and [
                f"            if (step + 1) % {p.passes} and step < end - 1:",
                "                continue",
            ],
            plain and f"            {plain}",
            "            optimizer.step()",
            "            optimizer.zero_grad()",
        ],
        schedule and "            schedule.step()",
        "    return [w.detach().numpy().copy() for w in plain.parameters()], None",
        "\n",
        "def fit(rank, plain, optimizer, schedule, end):",
        "    import lightning",
        "    from horovod_runner.lightning import HorovodStrategy",
        "",
        "    class Model(lightning.LightningModule):",
        "        def __init__(self):",
        "            super().__init__()",
        "            self.plain = plain",
        p.manual and "            self.automatic_optimization = False",
        "",
        "        def configure_optimizers(self):",
        "            return [optimizer], [{'scheduler': schedule, 'interval': 'step'}]"
        if schedule
        else "            return optimizer",
        "",
        "        def training_step(self, step, index):",
        "            step = int(step)",
        freezes
        and ["            if step == 2:", "                self.plain.first.requires_grad_(False)"],
        [
            "            used = self.optimizers()",
            "            used.zero_grad()",
            "            self.manual_backward(loss_of(self.plain, rank, step))",
            "            used.step()",
        ]
        if p.manual
        else "            return loss_of(self.plain, rank, step)",
        "",
        "    trainer = lightning.Trainer(",
        "        strategy=HorovodStrategy(), max_epochs=1, logger=False,",
        "        enable_checkpointing=False, enable_progress_bar=False,",
        "        enable_model_summary=False, use_distributed_sampler=False" + options,
        "    )",
        "    trainer.fit(Model(), torch.utils.data.DataLoader(range(end), batch_size=None))",
    )
