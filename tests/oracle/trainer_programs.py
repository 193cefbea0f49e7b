"""Programs for Hugging Face's Trainer, which uses DistributedDataParallel over the backend hvd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle import torch_programs
from tests.oracle.programs import Program, lines

CHOICES: dict[str, dict[str, list[Any]]] = {
    "trainer": {
        "ranks": [2, 1, 3],
        "steps": [4, 3, 6],
        "optimizer": ["sgd", "adamw_torch", "adagrad", "rmsprop"],
        "branch": ["none", "rank"],
        "head": [False, "unused"],
        "normalizes": [False, "batch", "layer"],
        "ties": [False, True],
        "frozen": [False, True],
        "passes": [1, 2],
        "clip": ["none", "norm"],
        "schedule": ["constant", "linear", "cosine"],
        "warms_up": [False, True],
        "decays": [False, True],
        "rows": ["equal"],
        "seeds": ["equal", "by rank"],
        "restart": ["none"],
    }
}


#: Choices that do not go together with others: each with the programs in which it is left out.
EXCLUDED: list[tuple[str, Callable[[Program], bool]]] = [
    ("passes", lambda p: bool(p.steps % 2)),
]


def source(program: Program) -> str:
    """See Program.source."""
    p = program
    unused = p.branch != "none" or p.head
    training = lines(
        "class Model(torch.nn.Module):",
        "    def __init__(self, ranks):",
        "        super().__init__()",
        "        self.plain = Network()",
        "        self.ranks = ranks",
        "",
        "    def forward(self, step=None):",
        "        losses = [loss_of(self.plain, rank, int(step[0])) for rank in self.ranks]",
        "        return {'loss': sum(losses) / len(losses)}",
        "\n",
        "def train(ranks, distributed, begin, end, state):",
        "    import tempfile",
        "    from transformers import Trainer, TrainingArguments",
        "",
        f"    torch.manual_seed({'ranks[0]' if p.seeds == 'by rank' else '0'})",
        "    model = Model(ranks).double()",
        "    class Own(Trainer):",
        "        def _get_train_sampler(self, *_):",
        "            return None",
        "",
        "        def get_train_dataloader(self):",
        "            steps = [{'step': torch.tensor([step])} for step in range(end)]",
        "            return torch.utils.data.DataLoader(steps, batch_size=None)",
        "",
        "    with tempfile.TemporaryDirectory() as folder:",
        "        arguments = TrainingArguments(",
        "            folder, num_train_epochs=1, save_strategy='no', report_to=[], use_cpu=True,",
        f"            learning_rate=0.05, disable_tqdm=True, optim='{p.optimizer}',",
        f"            max_steps=end // {p.passes}, gradient_accumulation_steps={p.passes},",
        f"            max_grad_norm={0.5 if p.clip == 'norm' else 0.0},",
        f"            lr_scheduler_type='{p.schedule}', warmup_steps={2 if p.warms_up else 0},",
        f"            weight_decay={0.1 if p.decays else 0.0},",
        f"            ddp_find_unused_parameters={bool(unused)}, full_determinism=False, seed=3,",
        "            remove_unused_columns=False, logging_strategy='no',",
        "        )",
        "        Own(model, arguments, train_dataset=list(range(end))).train()",
        "    return [w.detach().numpy().copy() for w in model.plain.parameters()], None",
        "\n",
        "def main(begin, end, state):",
        "    import os",
        "    import torch.distributed as dist",
        "",
        "    weights, saved = train([int(os.environ['RANK'])], True, begin, end, state)",
        "    if not dist.is_initialized():",
        "        return [weights], saved",
        "    found = [None] * dist.get_world_size()",
        "    dist.all_gather_object(found, weights)",
        "    return found, saved",
    )
    return "\n\n\n".join([*torch_programs.common(p), training]) + "\n"
