"""Programs for Keras 3, on torch and on TensorFlow, and for loops with a GradientTape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.programs import Program, lines, rows_by_rank

_OPTIMIZERS = {
    "sgd": "SGD(0.1{})",
    "momentum": "SGD(0.05, momentum=0.9{})",
    "nesterov": "SGD(0.05, momentum=0.9, nesterov=True{})",
    "adam": "Adam(0.05{})",
    "amsgrad": "Adam(0.05, amsgrad=True{})",
    "adamw": "AdamW(0.05, weight_decay=0.1{})",
    "decay": "SGD(0.05, momentum=0.9, weight_decay=0.1{})",
    "rmsprop": "RMSprop(0.02{})",
    "adagrad": "Adagrad(0.1{})",
    "nadam": "Nadam(0.02{})",
    "lion": "Lion(0.01{})",
}
_COMMON: dict[str, list[Any]] = {
    "ranks": [2, 1, 3, 4],
    "steps": [4, 3, 6],
    "optimizer": list(_OPTIMIZERS),
    "branch": ["none", "rank", "data", "rank 0", "cond"],
    "embedding": [False, True],
    "embeds": ["all ranks", "rank 0"],
    "normalizes": [False, "batch", "layer"],
    "head": [False, "unused"],
    "ties": [False, True],
    "frozen": [False, True],
    "clip": ["none", "clipnorm", "global_clipnorm", "clipvalue"],
    "average": [False, True],
    "schedule": [False, True],
    "ema": [False, True],
    "compression": ["none", "fp16"],
    "op": ["average", "sum", "predivide"],
    "groups": [0, 1, 2],
    "rows": ["equal", "uneven", "one row"],
    "seeds": ["by rank", "equal"],
    "restart": ["none", "weights"],
    "ranks_later": [2, 1, 3],
    "eager": [False, True],
}
_FIT: dict[str, list[Any]] = {
    **_COMMON,
    "passes": [1, 2, 3],
    "own_passes": [1, 2],
    "scaler": ["none", "plain", "infinity on rank 1", "infinity on all"],
    "fits": ["once", "twice", "freezes between", "recompiles"],
    "excludes": [False, True],  # a weight from weight decay
}
CHOICES: dict[str, dict[str, list[Any]]] = {
    "keras_torch": _FIT,
    "keras_tensorflow": {**_FIT, "steps_per_execution": [1, 2], "sparse_as_dense": [False, True]},
    "tape": {
        **{name: values for name, values in _COMMON.items() if name != "average"},
        "sparse_as_dense": [False, True],
        "skips": ["none", "tape on rank 1"],
    },
}


#: Choices that do not go together with others: each with the programs in which it is left out.
EXCLUDED: list[tuple[str, Callable[[Program], bool]]] = [
    ("own_passes", lambda p: p.passes > 1 or p.scaler != "none" or bool(p.steps % 2)),
    ("branch", lambda p: p.branch == "data" and not p.eager),
    ("fits", lambda p: p.restart != "none" or bool(p.steps % 2)),
    ("passes", lambda p: p.scaler != "none" or p.restart != "none" or p.fits != "once"),
    ("restart", lambda p: bool(p.ema) or p.scaler != "none" or p.own_passes > 1),
    ("excludes", lambda p: p.optimizer not in ("adamw", "decay")),
    ("groups", lambda p: p.branch != "none"),
    ("compression", lambda p: p.op == "predivide"),
    ("rows", lambda p: p.rows == "one row" and p.normalizes == "batch"),
    ("steps_per_execution", lambda p: bool(p.eager) or bool(p.steps % 2) or p.fits != "once"),
    ("steps_per_execution", lambda p: p.restart != "none"),
    ("clip", lambda p: p.clip == "clipvalue" and bool(p.embedding)),
    ("op", lambda p: p.framework == "tape" and p.op == "predivide" and bool(p.embedding)),
    ("embeds", lambda p: not p.embedding or (p.framework == "tape" and not p.eager)),
    ("head", lambda p: p.branch == "cond"),
    # A graph cannot know that no rank uses a weight, which the documentation says.
    ("head", lambda p: p.framework == "tape" and not p.eager),
    ("branch", lambda p: p.framework == "tape" and not p.eager and p.branch in ("rank", "rank 0")),
]


def undefined(program: Program) -> str:
    """See Program.undefined."""
    p = program
    if p.skips == "tape on rank 1" and p.ranks > 1:
        return "rank 1 leaves out a reduction"
    return ""


def only_alike(program: Program) -> str:
    """See Program.only_alike."""
    return "gradients are rounded" if program.compression == "fp16" else ""


def source(program: Program) -> str:
    """See Program.source."""
    p = program
    parts = [_imports(p), _network(p), _batches(p)]
    parts += [_tape(p) if p.framework == "tape" else _fit(p), _main(p)]
    return "\n\n\n".join(parts) + "\n"


def _imports(p: Program) -> str:
    backend = "torch" if p.framework == "keras_torch" else "tensorflow"
    return lines(
        f'"""{p}."""',
        "",
        "import os",
        "",
        f'os.environ["KERAS_BACKEND"] = "{backend}"',
        "import keras",
        "import numpy",
        "torch" in backend and "import torch",
        "tensor" in backend and "import tensorflow as tf",
        "",
        'keras.config.set_floatx("float64")',
        rows_by_rank(p),
    )


def _network(p: Program) -> str:
    table = 'self.table(keras.ops.cast(inputs[:, 4], "int32"))'
    if p.embeds == "rank 0":
        table = f"({table} if self.rank == 0 else 0)"
    branch = {
        "rank": "(self.left(h) if self.rank % 2 == 0 else self.right(h))",
        "data": "(self.left(h) if float(keras.ops.mean(x)) > 0 else self.right(h))",
        "rank 0": "(self.left(h) if self.rank == 0 else 0)",
        "cond": "keras.ops.cond(x[0, 0] > 0, lambda: self.left(h), lambda: self.right(h))",
    }.get(p.branch)
    right = branch and p.branch != "rank 0"
    norm = {"batch": "BatchNormalization", "layer": "LayerNormalization"}.get(p.normalizes)
    return lines(
        "class Network(keras.Model):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.rank = 0",
        '        self.first = keras.layers.Dense(6, "tanh", name="first")',
        p.frozen and "        self.first.trainable = False",
        p.ties and '        self.second = keras.layers.Dense(6, "tanh")',
        branch and "        self.left = keras.layers.Dense(6)",
        right and "        self.right = keras.layers.Dense(6)",
        p.embedding and "        self.table = keras.layers.Embedding(7, 6)",
        norm and f"        self.norm = keras.layers.{norm}()",
        p.head and "        self.head = keras.layers.Dense(2)",
        "        self.last = keras.layers.Dense(1)",
        "",
        "    def call(self, inputs, training=False):",
        "        x = inputs[:, :4]",
        "        h = self.first(x)",
        p.embedding and f"        h = h + {table}",
        norm and "        h = self.norm(h, training=training)",
        p.ties and "        h = self.second(self.second(h))",
        branch and f"        h = h + {branch}",
        "        return self.last(h)",
        "",
        "    def make(self):",
        '        """Make the weights, also of what is not used."""',
        "        self(numpy.zeros((1, 5)))",
        branch and "        self.left.built or self.left.build((None, 6))",
        right and "        self.right.built or self.right.build((None, 6))",
        p.embeds == "rank 0" and "        self.table.built or self.table.build((None,))",
        p.head and "        self.head.build((None, 6))",
        "        return self",
    )


def _batches(p: Program) -> str:
    infinite = {"infinity on rank 1": "rank == 1", "infinity on all": "True"}.get(p.scaler)
    return lines(
        "def batch(rank, step):",
        "    drawn = numpy.random.default_rng([step, rank])",
        "    x = drawn.normal(size=(ROWS[rank], 5))",
        "    x[:, 4] = drawn.integers(7, size=ROWS[rank])",
        "    y = x[:, :4].sum(1, keepdims=True) + 0.1 * x[:, 4:] + rank",
        infinite and [f"    if step == 1 and {infinite}:", "        y = y * numpy.inf"],
        "    return x, y",
        "\n",
        "def batches(rank, steps):",
        "    return map(numpy.concatenate, zip(*(batch(rank, step) for step in steps)))",
        "\n",
        "def weights_of(model):",
        "    return model.trainable_variables",
    )


def _optimizer(p: Program, passes: int = 1) -> str:
    passes *= p.own_passes
    clip = {"clipnorm": "0.1", "global_clipnorm": "0.5", "clipvalue": "0.05"}.get(p.clip)
    options = [
        clip and f"{p.clip}={clip}",
        p.ema and "use_ema=True, ema_overwrite_frequency=2",
        passes > 1 and f"gradient_accumulation_steps={passes}",
    ]
    made = _OPTIMIZERS[p.optimizer].format("".join(f", {each}" for each in options if each))
    if p.schedule:
        kind, _, rest = made.partition("(")
        rate = rest.split(",")[0].rstrip(")")
        decay = f"keras.optimizers.schedules.ExponentialDecay({rate}, 2, 0.5)"
        made = f"{kind}({decay}{rest[len(rate) :]}"
    made = f"keras.optimizers.{made}"
    if p.scaler != "none":
        made = (
            f"keras.optimizers.LossScaleOptimizer({made}, initial_scale=16.0, "
            "dynamic_growth_steps=2)"
        )
    return made


def _options(p: Program) -> str:
    options = [
        p.passes > 1 and f"backward_passes_per_step={p.passes}",
        p.passes > 1 and p.average and "average_aggregated_gradients=True",
        p.compression == "fp16" and "compression=hvd.Compression.fp16",
        p.op == "sum" and "op=hvd.Sum",
        p.op == "predivide" and "gradient_predivide_factor=2.0",
        p.groups and f"{'num_groups' if p.framework == 'tape' else 'groups'}={p.groups}",
        p.sparse_as_dense and "sparse_as_dense=True",
    ]
    return "".join(f", {each}" for each in options if each)


def _begin(p: Program) -> list[Any]:
    return [
        "def train(ranks, distributed, begin, end, state):",
        f"    keras.utils.set_random_seed({'1 + ranks[0]' if p.seeds == 'by rank' else '1'})",
        "    model = Network()",
        "    model.rank = ranks[0]",
        "    model.make()",
        f"    optimizer = {_optimizer(p)}",
        p.excludes and f"    {_EXCLUDES}",
        p.restart != "none"
        and [
            "    if state is not None:",
            "        model.set_weights(state[0])",
            "        optimizer.build(weights_of(model))",
            "        for variable, value in zip(optimizer.variables, state[1]):",
            "            variable.assign(value)",
        ],
    ]


def _end(p: Program) -> list[str]:
    weights = "    weights = [keras.ops.convert_to_numpy(v) for v in weights_of(model)]"
    if p.restart == "none":
        return [weights, "    return weights, None"]
    return [
        weights,
        "    kept = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]",
        "    return weights, (model.get_weights(), kept)",
    ]


_EXCLUDES = "optimizer.exclude_from_weight_decay([model.last.kernel])"


def _gradients(p: Program) -> str:
    scaled = "optimizer.scale_loss(loss)" if p.scaler != "none" else "loss"
    share = "" if p.op == "sum" else " / len(by_rank)"
    torch = p.framework == "keras_torch"
    differentiate: list[Any]
    if torch:
        differentiate = [
            "    model.zero_grad()",
            "    loss = keras.ops.mean((model(x, training=True) - y) ** 2)",
            f"    {scaled}.backward()",
            "    gradients = [v.value.grad for v in weights_of(model)]",
            "    return [None if g is None else g.clone() for g in gradients]",
        ]
    else:
        differentiate = [
            "    with tf.GradientTape() as tape:",
            "        loss = keras.ops.mean((model(x, training=True) - y) ** 2)",
            scaled != "loss" and f"        loss = {scaled}",
            "    gradients = tape.gradient(loss, weights_of(model))",
            # In a graph a branch that is not taken has gradients of zeros.
            (p.branch == "cond" and not p.eager)
            and [
                "    pairs = zip(gradients, weights_of(model))",
                "    gradients = [tf.zeros_like(v.value) if g is None else g for g, v in pairs]",
            ],
            "    return gradients",
        ]
    return lines(
        "def gradients_of(model, optimizer, rank, step):",
        "    model.rank = rank",
        "    x, y = map(keras.ops.convert_to_tensor, batch(rank, step))",
        differentiate,
        "\n",
        "def averaged(by_rank):",
        "    found = []",
        "    for gradients in zip(*by_rank):",
        "        there = [g for g in gradients if g is not None]",
        not torch
        and [
            "        if there and isinstance(there[0], tf.IndexedSlices):",
            "            values = tf.concat([g.values for g in there], 0)",
            f"            values = values{share}",
            "            places = tf.concat([g.indices for g in there], 0)",
            "            found.append(tf.IndexedSlices(values, places, (7, 6)))",
            p.sparse_as_dense and "            found[-1] = tf.convert_to_tensor(found[-1])",
            "            continue",
        ],
        f"        mean = sum(there){share} if there else None",
        "        found.append(mean)",
        "    return found",
    )


def _fit(p: Program) -> str:
    torch = p.framework == "keras_torch"
    executes = ", steps_per_execution=2" if p.steps_per_execution == 2 else ""
    compiles = (
        f'        model.compile(optimizer, "mse", run_eagerly={bool(p.eager)}, jit_compile=False'
        f"{executes})"
    )
    callbacks = "[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]"
    fit = f"model.fit(x, y, batch_size=ROWS[rank], shuffle=False, verbose=0, callbacks={callbacks})"
    once, freezes = p.fits == "once", p.fits == "freezes between"
    again = freezes or p.fits == "recompiles"
    factor = p.passes if not p.average else 1
    return lines(
        _gradients(p),
        "\n",
        _begin(p),
        "    if distributed:",
        "        (rank,) = ranks",
        f"        optimizer = hvd.DistributedOptimizer(optimizer{_options(p)})",
        compiles,
        ["        x, y = batches(rank, range(begin, end))", f"        {fit}"]
        if once
        else [
            "        middle = (begin + end) // 2",
            "        for steps in (range(begin, middle), range(middle, end)):",
            "            x, y = batches(rank, steps)",
            f"            {fit}",
            again
            and [
                "            if steps.start == begin:",
                freezes and "                model.first.trainable = False",
                f"                optimizer = {_optimizer(p)}",
                f"                optimizer = hvd.DistributedOptimizer(optimizer{_options(p)})",
                p.excludes and f"                {_EXCLUDES}",
                f"        {compiles}",
            ],
        ],
        "    else:",
        p.passes > 1 and f"        optimizer = {_optimizer(p, p.passes)}",
        not once and "        middle = (begin + end) // 2",
        "        for step in range(begin, end):",
        not once
        and [
            "            if step == middle:",
            "                optimizer.finalize_variable_values(weights_of(model))",
            freezes and "                model.first.trainable = False",
            again and f"                optimizer = {_optimizer(p)}",
            again and p.excludes and f"                {_EXCLUDES}",
        ],
        "            found = [gradients_of(model, optimizer, r, step) for r in ranks]",
        "            gradients = averaged(found)",
        factor > 1
        and f"            gradients = [g if g is None else g * {factor} for g in gradients]",
        torch and "            with torch.no_grad():",
        f"            {'    ' if torch else ''}optimizer.apply(gradients, weights_of(model))",
        "        optimizer.finalize_variable_values(weights_of(model))  # as fit does",
        freezes and "    model.first.trainable = True",
        _end(p),
    )


def _tape(p: Program) -> str:
    return lines(
        _gradients(p),
        "\n",
        _begin(p),
        "    if distributed:",
        "        (rank,) = ranks",
        "",
        not p.eager and "        @tf.function",
        "        def update(x, y):",
        "            with tf.GradientTape() as tape:",
        "                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)",
        f"            tape = hvd.DistributedGradientTape(tape{_options(p)})",
        "            gradients = tape.gradient(loss, weights_of(model))",
        "            optimizer.apply_gradients(",
        "                (g, v) for g, v in zip(gradients, weights_of(model)) if g is not None",
        "            )",
        "",
        "        optimizer.build(weights_of(model))",
        "        hvd.broadcast_variables(model.variables, root_rank=0)",
        "        hvd.broadcast_variables(optimizer.variables, root_rank=0)",
        "        for step in range(begin, end):",
        p.skips == "tape on rank 1"
        and ["            if rank == 1 and step == 1:", "                continue"],
        "            x, y = batch(rank, step)",
        "            update(tf.constant(x), tf.constant(y))",
        "    else:",
        "        for step in range(begin, end):",
        "            found = [gradients_of(model, optimizer, r, step) for r in ranks]",
        "            gradients = averaged(found)",
        "            optimizer.apply_gradients(",
        "                (g, v) for g, v in zip(gradients, weights_of(model)) if g is not None",
        "            )",
        _end(p),
    )


def _main(p: Program) -> str:
    module = "horovod.tensorflow" if p.framework == "tape" else "horovod_runner.keras"
    gather = "hvd.allgather_object(weights)" if p.framework == "tape" else "gathered(weights)"
    return lines(
        p.framework != "tape"
        and [
            "def gathered(weights):",
            "    both = numpy.concatenate([numpy.ravel(each) for each in weights])",
            '    found = keras.ops.convert_to_numpy(hvd.allgather(both[None], name="w"))',
            "    return [[each] for each in found]",
            "\n",
        ],
        "def main(begin, end, state):",
        "    global hvd",
        f"    import {module} as hvd",
        "",
        "    hvd.init()",
        "    weights, saved = train([hvd.rank()], True, begin, end, state)",
        f"    return {gather}, saved",
    )
