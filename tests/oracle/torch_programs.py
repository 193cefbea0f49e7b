"""Programs for PyTorch: Horovod's optimizer, and DistributedDataParallel over the backend hvd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.programs import Program, lines, rows_by_rank

_OPTIMIZERS = {
    "sgd": "SGD({}, lr=0.1)",
    "momentum": "SGD({}, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "nesterov": "SGD({}, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "Adam({}, lr=0.05)",
    "amsgrad": "Adam({}, lr=0.05, amsgrad=True, weight_decay=0.01)",
    "adamw": "AdamW({}, lr=0.05, weight_decay=0.1)",
    "rmsprop": "RMSprop({}, lr=0.02, momentum=0.5)",
    "adagrad": "Adagrad({}, lr=0.1)",
    "lbfgs": "LBFGS({}, lr=0.1, max_iter=3)",
}
_SCHEDULES = {
    "step": "StepLR(optimizer, 2, 0.5)",
    "cosine": "CosineAnnealingLR(optimizer, 8)",
    "lambda": "LambdaLR(optimizer, lambda step: 1 / (step + 1))",
    "one cycle": "OneCycleLR(optimizer, 0.2, total_steps=20)",
}
#: What network layers there may be, beside the first and the last one.
NETWORK: dict[str, list[Any]] = {
    "branch": ["none", "rank", "turns", "data", "rank 0"],
    "embedding": ["none", "dense", "sparse"],
    "embeds": ["all ranks", "rank 0"],
    "normalizes": [False, "batch", "layer"],
    "head": [False, "unused"],
    "ties": [False, True],
    "frozen": [False, True],
    "buffer": [False, True],
    "convolution": [False, True],
}
#: Code that lists all weights except the first layer's, for a second parameter group.
REST = """def rest(model):
    first = set(model.first.parameters())
    return [w for w in model.parameters() if w not in first]"""
_COMMON: dict[str, list[Any]] = {
    "ranks": [2, 1, 3, 4],
    "steps": [4, 3, 6],
    "optimizer": list(_OPTIMIZERS),
    "groups_of_weights": [1, 2],
    "changes": ["none", "freezes later", "unfreezes later", "adds later"],
    "schedule": ["none", *_SCHEDULES],
    "passes": [1, 2, 3],
    "rest": [False, True],  # whether the last step has fewer passes
    "clip": ["none", "norm", "value", "norm of a part"],
    "scaler": ["none", "plain", "unscales", "infinity on rank 1", "infinity on all"],
    "skips": ["none", "backward on rank 1", "backward on all", "step on rank 1"],
    "losses": ["one", "two", "penalty"],
    "set_to_none": [True, False],
    "zeroes": ["before", "after", "model"],
    "compiles": [False, "before", "after"],
    "rows": ["equal", "uneven", "one row", "a feed"],
    "restart": ["none", "loads before wrapping", "loads after wrapping", "rank 0 loads"],
    "ranks_later": [2, 1, 3],
    "seeds": ["by rank", "equal"],
    "gan": [False, "textbook", "freezes"],
}
CHOICES: dict[str, dict[str, list[Any]]] = {
    "torch": {
        **_COMMON,
        **NETWORK,
        "schedule_made": ["after wrapping", "before wrapping"],
        "closure": [False, True],
        "compression": ["none", "fp16"],
        "op": ["average", "sum", "predivide"],
        "fused_groups": [0, 1, 2],
        "sparse_as_dense": [False, True],
        "pauses": [False, "synchronizes"],
        "named": [True, False],
        "hooks": ["none", "step", "gradient"],
        "joins": [False, True],
    },
    "ddp": {
        **_COMMON,
        **NETWORK,
        "finds_unused": [False, True],
        "static": [False, True],
        "views": [False, True],
        "hook": ["none", "fp16", "powersgd", "allreduce"],
        "zero": [False, True],
        "bucket": ["usual", "small"],
    },
}


#: Choices that do not go together with others: each with the programs in which it is left out.
EXCLUDED: list[tuple[str, Callable[[Program], bool]]] = [
    *(
        (name, lambda p: p.optimizer == "lbfgs")
        for name in (
            *("groups_of_weights", "scaler", "changes", "gan", "schedule", "passes", "zero"),
            *("embedding", "skips", "losses", "clip", "restart", "rows", "hooks"),
        )
    ),
    ("optimizer", lambda p: p.framework == "ddp" and p.optimizer == "lbfgs"),
    ("embedding", lambda p: _is_sparse(p) and p.optimizer not in ("sgd", "adagrad")),
    ("embedding", lambda p: _is_sparse(p) and (p.clip != "none" or p.scaler != "none")),
    ("embedding", lambda p: _is_sparse(p) and (p.losses == "penalty" or p.schedule != "none")),
    ("embedding", lambda p: _is_sparse(p) and (not p.set_to_none or p.framework == "ddp")),
    ("embeds", lambda p: p.embedding == "none" or p.framework == "ddp" or reads_feed(p)),
    ("embeds", lambda p: bool(p.compiles)),
    ("schedule", lambda p: p.changes == "adds later" or p.restart != "none"),
    (
        "schedule",
        lambda p: p.schedule == "one cycle" and p.optimizer not in ("momentum", "nesterov", "adam"),
    ),
    ("changes", lambda p: p.restart != "none" or bool(p.gan)),
    ("changes", lambda p: p.changes == "freezes later" and p.framework == "ddp"),
    ("gan", lambda p: p.restart != "none" or p.passes > 1 or p.losses != "one"),
    ("gan", lambda p: p.skips != "none" or bool(p.compiles)),
    ("gan", lambda p: p.scaler != "none" or p.clip != "none"),
    ("rows", lambda p: p.rows == "one row" and p.normalizes == "batch"),
    ("losses", lambda p: bool(p.compiles or p.convolution or p.framework == "ddp")),
    ("ties", lambda p: p.losses == "penalty"),
    ("skips", lambda p: p.scaler != "none"),
    ("groups_of_weights", lambda p: p.changes == "adds later"),
    # A feed divides the rows of a step among the ranks, and one process has no ranks.
    ("rows", lambda p: reads_feed(p) and (p.branch != "none" or p.normalizes == "batch")),
    ("rows", lambda p: reads_feed(p) and (p.skips not in ("none", "backward on all"))),
    ("rows", lambda p: reads_feed(p) and p.scaler not in ("none", "plain", "unscales")),
    ("rows", lambda p: reads_feed(p) and p.restart != "none" and p.rest),
    ("rows", lambda p: reads_feed(p) and (bool(p.gan) or _has_closure(p))),
    ("rows", lambda p: reads_feed(p) and p.framework == "torch" and (p.joins or p.op == "sum")),
    # DistributedDataParallel
    ("static", lambda p: bool(p.finds_unused) or p.passes > 1),
    ("bucket", lambda p: p.compiles == "before"),  # torch refuses buckets that small there
    ("hook", lambda p: p.hook == "powersgd" and (p.branch != "none" or bool(p.head or p.static))),
    ("zero", lambda p: p.hook != "none" or p.groups_of_weights > 1 or p.restart != "none"),
    ("zero", lambda p: p.scaler != "none" or bool(p.gan) or p.changes != "none"),
    ("gan", lambda p: p.hook != "none" or bool(p.finds_unused or p.static)),
    ("gan", lambda p: p.framework == "ddp" and p.branch != "none"),
    # Horovod's optimizer
    ("closure", lambda p: p.scaler != "none" or p.passes > 1 or p.skips != "none"),
    ("closure", lambda p: p.clip != "none" or bool(p.gan) or p.losses != "one"),
    ("pauses", lambda p: bool(p.closure or p.gan) or p.optimizer == "lbfgs" or p.passes > 1),
    ("pauses", lambda p: p.scaler == "plain"),
    ("compression", lambda p: p.op == "predivide"),
    ("fused_groups", lambda p: p.embedding == "sparse"),
    ("sparse_as_dense", lambda p: not _is_sparse(p)),
    ("joins", lambda p: p.skips != "none" or p.scaler != "none" or p.passes > 1),
    ("joins", lambda p: bool(p.closure or p.gan) or _is_sparse(p) or p.optimizer == "lbfgs"),
    ("joins", lambda p: p.restart != "none" or p.clip != "none" or p.changes != "none"),
    ("joins", lambda p: bool(p.fused_groups)),
]


def reads_feed(p: Program) -> bool:
    """Whether the rows come from a dataset that the run has as an argument."""
    return bool(p.rows == "a feed")


def _is_sparse(p: Program) -> bool:
    return bool(p.embedding == "sparse")


def undefined(program: Program) -> str:
    """See Program.undefined."""
    p = program
    ddp = p.framework == "ddp"
    if ddp and not p.finds_unused and (p.branch != "none" or p.head):
        return "DDP asks for find_unused_parameters"
    if p.ranks == 1 and p.restart == "none":
        return ""
    reasons = {
        "rank 1 leaves out a step": p.skips == "step on rank 1",
        "DDP broadcasts nothing after it is made": ddp and p.restart == "rank 0 loads",
        "DDP does not know the weights": ddp and p.changes in ("adds later", "unfreezes later"),
        "DDP waits for the backward pass of all ranks": ddp and p.skips != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def only_alike(program: Program) -> str:
    """See Program.only_alike."""
    p = program
    rounds = p.compression == "fp16" or p.hook in ("fp16", "powersgd")
    return "gradients are rounded" if rounds else ""


def source(program: Program) -> str:
    """See Program.source."""
    training = _gan(program) if program.gan else _train(program)
    return "\n\n\n".join([*common(program), training, main(program)]) + "\n"


def common(program: Program) -> list[str]:
    """The parts of a script that make a network, batches and losses."""
    return [_imports(program), _network(program), _batches(program), _loss(program)]


def _imports(p: Program) -> str:
    return lines(
        f'"""{p}."""',
        "",
        "from contextlib import nullcontext",
        "",
        "import torch",
        "",
        reads_feed(p) or rows_by_rank(p),
    )


def _network(p: Program) -> str:
    experts = p.branch in ("rank", "turns", "data")
    condition = {
        "rank": "rank % 2 == 0",
        "turns": "(rank + step) % 2 == 0",
        "data": "x.mean() > 0",
        "rank 0": "rank == 0",
    }.get(p.branch)
    table = "(self.table(ids) if rank == 0 else 0)" if p.embeds == "rank 0" else "self.table(ids)"
    norm = {"batch": "BatchNorm1d(6)", "layer": "LayerNorm(6)"}.get(p.normalizes)
    return lines(
        "class Network(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.first = torch.nn.Linear(4, 6)",
        p.frozen and "        self.first.bias.requires_grad_(False)",
        p.ties and "        self.second, self.third = (torch.nn.Linear(6, 6) for _ in range(2))",
        p.ties and "        self.third.weight = self.second.weight",
        (experts or p.branch == "rank 0")
        and "        self.left, self.right = (torch.nn.Linear(6, 6) for _ in range(2))",
        p.branch == "rank 0" and "        del self.right",
        p.embedding != "none"
        and f"        self.table = torch.nn.Embedding(7, 6, sparse={p.embedding == 'sparse'})",
        norm and f"        self.norm = torch.nn.{norm}",
        p.convolution and "        self.convolution = torch.nn.Conv2d(2, 6, (1, 2))",
        p.head and "        self.head = torch.nn.Linear(6, 2)",
        p.buffer and '        self.register_buffer("seen", torch.zeros(()))',
        "        self.last = torch.nn.Linear(6, 1)",
        "",
        "    def forward(self, x, ids, rank, step):",
        "        h = torch.tanh(self.first(x))",
        p.convolution
        and "        h = h + self.convolution(x.reshape(-1, 2, 1, 2)).mean((2, 3)).tanh()",
        p.embedding != "none" and f"        h = h + {table}",
        norm and "        h = self.norm(h)",
        p.ties and "        h = torch.tanh(self.third(torch.tanh(self.second(h))))",
        experts and f"        h = h + (self.left(h) if {condition} else self.right(h))",
        p.branch == "rank 0" and f"        h = h + (self.left(h) if {condition} else 0)",
        p.buffer and "        self.seen += 1",
        "        return self.last(h)",
    )


_FEED = """ROWS, STEP = 47, 11  # of the dataset, and of a step of all ranks
feed, batches, latest = None, None, {}


def table():
    import pyarrow

    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)
    ids = torch.randint(7, (ROWS,), generator=drawn)
    y = x.sum(1) + 0.1 * ids
    columns = {f"x{number}": x[:, number].numpy() for number in range(4)}
    return pyarrow.table({**columns, "ids": ids.numpy(), "y": y.numpy()})


def endless():
    while True:
        yield from feed


def open_feed(data, state):
    global feed, batches
    columns = {"x": [f"x{number}" for number in range(4)], "ids": "ids", "y": "y"}
    dtypes = {"x": "float64", "y": "float64"}
    feed = data.to_torch(global_batch=STEP, columns=columns, dtypes=dtypes)
    if state is not None:
        feed.load_state_dict(state["feed"])
    batches = endless()
    latest.clear()


def batch(rank, step):
    if feed is None:  # in one process
        first = STEP * (step % -(-ROWS // STEP))
        rows = table().slice(first, STEP).to_pydict()
        x = torch.tensor([rows[f"x{number}"] for number in range(4)], dtype=torch.float64).T
        return x, torch.tensor(rows["ids"]), torch.tensor(rows["y"], dtype=torch.float64)[:, None]
    if step not in latest:
        latest.clear()
        latest[step] = next(batches)
    x, ids, y = latest[step]
    return x, ids, y[:, None]"""


def _batches(p: Program) -> str:
    if reads_feed(p):
        return _FEED
    infinite = {"infinity on rank 1": "rank == 1", "infinity on all": "True"}.get(p.scaler)
    return lines(
        "def batch(rank, step):",
        "    drawn = torch.Generator().manual_seed(1000 * step + rank)",
        "    x = torch.randn(ROWS[rank], 4, generator=drawn, dtype=torch.float64)",
        "    ids = torch.randint(7, (ROWS[rank],), generator=drawn)",
        "    y = x.sum(1, keepdim=True) + 0.1 * ids[:, None] + rank",
        infinite and [f"    if step == 1 and {infinite}:", "        y = y * float('inf')"],
        "    return x, ids, y",
    )


def _loss(p: Program) -> str:
    return lines(
        "def loss_of(model, rank, step):",
        "    x, ids, y = batch(rank, step)",
        p.losses == "penalty" and "    x.requires_grad_()",
        "    out = model(x, ids, rank, step)",
        "    loss = (out - y).square().mean()",
        p.losses == "penalty"
        and [
            "    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)",
            "    loss = loss + 0.1 * slope.square().mean()",
        ],
        "    return loss",
        p.losses == "two"
        and [
            "\n",
            "def other_loss_of(model, rank, step):",
            "    x, ids, _ = batch(rank, step)",
            "    return 0.1 * model(x, ids, rank, step).abs().mean()",
        ],
    )


def optimizer(p: Program, weights: str) -> str:
    """Code that makes an optimizer."""
    if p.groups_of_weights == 2:
        weights = "[dict(params=plain.first.parameters(), lr=0.01), dict(params=rest(plain))]"
    return f"torch.optim.{_OPTIMIZERS[p.optimizer].format(weights)}"


def schedule(p: Program) -> str | None:
    """Code that makes a learning rate schedule."""
    return _SCHEDULES.get(p.schedule)


def _wrap(p: Program, optimizer: str = "optimizer", model: str = "model") -> list[str]:
    passes = p.passes * (2 if p.losses == "two" else 1)
    options = [
        p.named and f"named_parameters={model}.named_parameters()",
        passes > 1 and f"backward_passes_per_step={passes}",
        p.compression == "fp16" and "compression=hvd.Compression.fp16",
        p.op == "sum" and "op=hvd.Sum",
        p.op == "predivide" and "gradient_predivide_factor=2.0",
        p.fused_groups and f"groups={p.fused_groups}",
        p.sparse_as_dense and "sparse_as_dense=True",
    ]
    arguments = ", ".join(["", *(each for each in options if each)])
    return [
        f"        {optimizer} = hvd.DistributedOptimizer({optimizer}{arguments})",
        f"        hvd.broadcast_parameters({model}.state_dict(), root_rank=0)",
        f"        hvd.broadcast_optimizer_state({optimizer}, root_rank=0)",
    ]


def _parallel(p: Program) -> list[Any]:
    options = [
        p.finds_unused and "find_unused_parameters=True",
        p.static and "static_graph=True",
        p.views and "gradient_as_bucket_view=True",
        p.bucket == "small" and "bucket_cap_mb=0.0001",
    ]
    arguments = ", ".join(["", *(each for each in options if each)])
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    hook = {
        "fp16": ("default_hooks", "None, default_hooks.fp16_compress_hook"),
        "allreduce": ("default_hooks", "None, default_hooks.allreduce_hook"),
        "powersgd": (
            "powerSGD_hook",
            "powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), "
            "powerSGD_hook.powerSGD_hook",
        ),
    }.get(p.hook)
    return [
        "        plain = model",
        f"        model = torch.nn.parallel.DistributedDataParallel(model{arguments})",
        hook
        and [
            f"        from {hooks} import {hook[0]}",
            f"        model.register_comm_hook({hook[1]})",
        ],
    ]


def _train(p: Program) -> str:
    ddp = p.framework == "ddp"
    later = {
        "freezes later": "model.first.requires_grad_(False)",
        "unfreezes later": "plain.first.weight.requires_grad_(True)",
        "adds later": 'optimizer.add_param_group({"params": list(plain.last.parameters())})',
    }.get(p.changes)
    weights = "(w for n, w in model.named_parameters() if 'last' not in n)"
    given = weights if p.changes == "adds later" else "model.parameters()"
    made = schedule(p)
    makes_schedule = made and f"    schedule = torch.optim.lr_scheduler.{made}"
    early = not ddp and p.schedule_made == "before wrapping"
    loads = {
        "loads before wrapping": "",
        "loads after wrapping": "",
        "rank 0 loads": " and 0 in ranks",
    }.get(p.restart)
    load = loads is not None and [
        f"    if state is not None{loads}:",
        '        plain.load_state_dict(state["model"])',
        '        optimizer.load_state_dict(state["optimizer"])',
    ]
    loads_early = p.restart == "loads before wrapping"
    makes: Any = f"    optimizer = {optimizer(p, given)}"
    if ddp and p.zero:
        kind, _, rest = _OPTIMIZERS[p.optimizer].partition("({}")
        makes = [
            "    if distributed:",
            "        from torch.distributed.optim import ZeroRedundancyOptimizer",
            f"        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.{kind}"
            f"{rest}",
            "    else:",
            f"        optimizer = {optimizer(p, given)}",
        ]
    hook = {
        "step": [
            "    def shorten(optimizer, *_):",
            "        for group in optimizer.param_groups:",
            "            for w in group['params']:",
            "                if w.grad is not None and not w.grad.is_sparse:",
            "                    w.grad.clamp_(-0.5, 0.5)",
            "",
            "    optimizer.register_step_pre_hook(shorten)",
        ],
        "gradient": ["    plain.last.weight.register_hook(lambda gradient: gradient * 2)"],
    }.get(p.hooks)
    return lines(
        REST,
        "\n",
        "def train(ranks, distributed, begin, end, state):",
        reads_feed(p) and "    ranks = ranks if distributed else [0]",
        f"    torch.manual_seed({'ranks[0]' if p.seeds == 'by rank' else '0'})",
        "    plain = model = Network().double()",
        p.changes == "unfreezes later" and "    plain.first.weight.requires_grad_(False)",
        p.compiles == "before" and '    model = torch.compile(model, backend="eager")',
        ddp and ["    if distributed:", _parallel(p)],
        makes,
        hook,
        early and makes_schedule,
        loads_early and load,
        not ddp and ["    if distributed:", _wrap(p)],
        not early and makes_schedule,
        not loads_early and load,
        (p.restart == "rank 0 loads" and not ddp)
        and [
            "    if distributed:",
            "        hvd.broadcast_parameters(plain.state_dict(), root_rank=0)",
            "        hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
        ],
        p.compiles == "after" and '    model = torch.compile(model, backend="eager")',
        p.scaler != "none"
        and '    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)',
        "    for step in range(begin, end):",
        p.joins
        and [
            "        if distributed and ranks[0] == 1 and step == end - 1:",
            "            break  # this rank has fewer batches",
        ],
        later and ["        if step == 2:", f"            {later}"],
        p.zeroes == "before" and f"        optimizer.zero_grad({_none(p)})",
        p.zeroes == "model" and f"        plain.zero_grad({_none(p)})",
        _closure(p) if _has_closure(p) else _passes(p),
        made and "        schedule.step()",
        p.zeroes == "after" and not _has_closure(p) and f"        optimizer.zero_grad({_none(p)})",
        p.joins
        and [
            "    if distributed:",
            "        hvd.join()",
            "        hvd.broadcast_parameters(plain.state_dict(), root_rank=0)",
        ],
        "    weights = [w.detach().numpy().copy() for w in plain.parameters()]",
        '    saved = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}'
        if p.restart != "none"
        else "    saved = None",
        (p.restart != "none" and reads_feed(p))
        and ["    if distributed:", '        saved["feed"] = feed.state_dict()'],
        "    return weights, saved",
    )


def _none(p: Program) -> str:
    return "" if p.set_to_none else "set_to_none=False"


def _has_closure(p: Program) -> bool:
    return p.optimizer == "lbfgs" or bool(p.closure)


def _closure(p: Program) -> list[str]:
    return [
        "",
        "        def closure():",
        f"            optimizer.zero_grad({_none(p)})",
        "            total = 0",
        "            for rank in ranks:",
        f"                loss = loss_of(model, rank, step){_share(p)}",
        "                loss.backward()",
        "                total += loss.detach()",
        "            return total",
        "",
        "        optimizer.step(closure)",
    ]


def _passes(p: Program) -> list[str]:
    share = f"{_share(p)} / {p.passes}" if p.passes > 1 else _share(p)
    count = f"{p.passes} if step < end - 1 else 1" if p.rest else str(p.passes)
    scaled = p.scaler != "none"
    skip = {
        "backward on rank 1": "rank == 1 and step == 1",
        "backward on all": "step == 1",
    }.get(p.skips)
    backward = ["scaler.scale(loss).backward()" if scaled else "loss.backward()"]
    if p.losses == "two":
        backward = [
            *backward,
            f"loss = other_loss_of(model, rank, {_number(p)}){share}",
            *backward,
        ]
    if skip:
        backward = [f"if not ({skip}):", *(f"    {line}" for line in backward)]
    joined = ["    if rank == 1 and step == end - 1:", "        continue"]
    clip = {
        "norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
        "value": "torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)",
        "norm of a part": "torch.nn.utils.clip_grad_norm_(plain.first.parameters(), 0.1)",
    }.get(p.clip)
    step = "scaler.step(optimizer)" if scaled else "optimizer.step()"
    unscales = scaled and (p.scaler == "unscales" or p.clip != "none")
    after = [
        p.pauses and "if distributed:",
        p.pauses and "    optimizer.synchronize()",
        unscales and "scaler.unscale_(optimizer)",
        clip,
        p.pauses and "with optimizer.skip_synchronize() if distributed else nullcontext():",
        f"{'    ' if p.pauses else ''}{step}",
        scaled and "scaler.update()",
    ]
    if p.skips == "step on rank 1":
        after = [
            "if not (1 in ranks and len(ranks) == 1 and step == 1):",
            *(f"    {line}" for line in after if line),
        ]
    body = [
        *(joined if p.joins else []),
        f"    loss = loss_of(model, rank, {_number(p)}){share}",
        *(f"    {line}" for line in backward),
    ]
    if p.passes == 1:
        passes = ["for rank in ranks:", *body]
    elif p.framework == "ddp":
        passes = [
            f"count = {count}",
            "for part in range(count):",
            "    quiet = distributed and part < count - 1",
            "    with model.no_sync() if quiet else nullcontext():",
            "        for rank in ranks:",
            *(f"        {line}" for line in body),
        ]
    else:
        passes = [
            f"for part in range({count}):",
            "    for rank in ranks:",
            *(f"    {line}" for line in body),
        ]
    return [f"        {line}" for line in (*passes, *after) if line]


def _number(p: Program) -> str:
    return f"{p.passes} * step + part" if p.passes > 1 else "step"


def _gan(p: Program) -> str:
    ddp = p.framework == "ddp"
    freezes = p.gan == "freezes"
    wraps = (
        [
            "        model = torch.nn.parallel.DistributedDataParallel(model)",
            "        critic = torch.nn.parallel.DistributedDataParallel(critic)",
        ]
        if ddp
        else [*_wrap(p), *_wrap(p, "other", "critic")]
    )
    return lines(
        REST,
        "\n",
        "def train(ranks, distributed, begin, end, state):",
        f"    torch.manual_seed({'ranks[0]' if p.seeds == 'by rank' else '0'})",
        "    plain = model = Network().double()",
        "    judge = critic = torch.nn.Sequential(",
        "        torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)",
        "    ).double()",
        ddp and ["    if distributed:", wraps],
        f"    optimizer = {optimizer(p, 'model.parameters()')}",
        "    other = torch.optim.Adam(critic.parameters(), lr=0.02)",
        not ddp and ["    if distributed:", wraps],
        "    for step in range(begin, end):",
        freezes and "        judge.requires_grad_(True)",
        f"        other.zero_grad({_none(p)})",
        "        for rank in ranks:",
        "            x, ids, y = batch(rank, step)",
        "            fake = model(x, ids, rank, step).detach()",
        "            both = critic(torch.cat([y, fake]))",
        "            loss = torch.nn.functional.softplus(both[len(y):]).mean()",
        "            loss = loss + torch.nn.functional.softplus(-both[: len(y)]).mean()",
        f"            (loss{_share(p)}).backward()",
        "        other.step()",
        freezes and "        judge.requires_grad_(False)",
        f"        optimizer.zero_grad({_none(p)})",
        "        for rank in ranks:",
        "            x, ids, y = batch(rank, step)",
        "            out = critic(model(x, ids, rank, step))",
        f"            (torch.nn.functional.softplus(-out).mean(){_share(p)}).backward()",
        "        optimizer.step()",
        "    weights = [w.detach().numpy().copy() for w in plain.parameters()]",
        "    weights += [w.detach().numpy().copy() for w in judge.parameters()]",
        "    return weights, None",
    )


def _share(p: Program) -> str:
    return "" if p.op == "sum" else " / len(ranks)"


def main(p: Program) -> str:
    """Code of the function that each rank runs."""
    data = ", data" if reads_feed(p) else ""
    opens = reads_feed(p) and "    open_feed(data, state)"
    if p.framework != "ddp":
        return lines(
            f"def main(begin, end, state{data}):",
            "    global hvd",
            "    import horovod.torch as hvd",
            "",
            "    hvd.init()",
            opens,
            "    weights, saved = train([hvd.rank()], True, begin, end, state)",
            "    return hvd.allgather_object(weights), saved",
        )
    return lines(
        f"def main(begin, end, state{data}):",
        "    import torch.distributed as dist",
        "",
        "    if not dist.is_initialized():",
        "        dist.init_process_group()",
        opens,
        "    weights, saved = train([dist.get_rank()], True, begin, end, state)",
        "    found = [None] * dist.get_world_size()",
        "    dist.all_gather_object(found, weights)",
        "    return found, saved",
    )
