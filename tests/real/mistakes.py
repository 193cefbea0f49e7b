"""The mistakes that `test_mistakes` makes on purpose: what a user sees, and what to do.

``docs/mistakes.py`` makes the list in docs/howto/troubleshooting.md from this one. A `Mistake` with
the result "told" has words of the message that is shown, and the test looks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "works": what was meant happens. "warned": the training goes on, and the driver shows a line.
#: "error": the run ends. "unknown": it cannot be known.
Result = Literal["works", "warned", "error", "unknown"]


@dataclass(frozen=True)
class Mistake:
    """A mistake in training code.

    Attributes:
        code: the line that is wrong, as Markdown.
        result: what happens.
        text: words of the message; or why it works, or cannot be known.
        remedy: what to do; empty where the message says it or nothing is to do.
    """

    code: str
    result: Result
    text: str
    remedy: str = ""


DATA = {
    "A feed is made anew in each epoch": Mistake(
        "`for epoch in ...: for x, y in data.to_torch(64, shuffle=True)`",
        "works",
        "Each feed goes on with the next epoch of those before it.",
    ),
    "The seed differs by rank": Mistake(
        "`data.to_torch(64, shuffle=True, seed=hvd.rank())`",
        "warned",
        "Make the same feeds on all ranks, with the same options and seed",
        "Use the same seed on all ranks: each gets its part of one order.",
    ),
    "Rank 0 alone evaluates its part": Mistake(
        "`if hvd.rank() == 0: evaluate_by_hand(valid.to_torch(64))`",
        "warned",
        "so rank 0 did not see the whole dataset there",
        "Call `evaluate(feed, measure)` on every rank.",
    ),
    "A feed's state is loaded in each epoch": Mistake(
        "`for epoch in ...: feed.load_state_dict(saved)`",
        "warned",
        "because the same state was loaded twice",
        "Load it once, before the loop.",
    ),
    "A run resumes without its feed's state": Mistake(
        "`load_checkpoint()`, and no `feed.load_state_dict()`",
        "warned",
        "begins with the order of epoch 0 again",
        "Save `feed.state_dict()` in the checkpoint.",
    ),
    "The batch size differs by rank": Mistake(
        "`data.to_torch(32 * (hvd.rank() + 1))`",
        "error",
        "did not call the same collectives",
        "Use the same batch size on all ranks, or `global_batch`. A warning comes before.",
    ),
    "The last batch is dropped on some ranks": Mistake(
        "`DataLoader(own_part, drop_last=True)`, with parts of different lengths",
        "error",
        "returned from main while rank 0 still waited in a collective",
        "Pass the dataset to `run`: a shard has the same number of batches on every rank.",
    ),
    "A `DistributedSampler` without `set_epoch`": Mistake(
        "`for epoch in ...: for x, y in loader`",
        "warned",
        "Call sampler.set_epoch(epoch) at the beginning of each epoch.",
    ),
    "A `DistributedSampler` without its arguments": Mistake(
        "`DistributedSampler(dataset)`",
        "error",
        "Default process group has not been initialized",
        "Pass `num_replicas=hvd.size(), rank=hvd.rank()`.",
    ),
    "No `DistributedSampler`": Mistake(
        "`DataLoader(whole_dataset, shuffle=True)`",
        "unknown",
        "A rank cannot know whether its dataset is its part or the whole.",
        "Pass the dataset to `run`, or use a `DistributedSampler`.",
    ),
    "Words are numbered in the order of a set": Mistake(
        "`vocabulary = {word: i for i, word in enumerate(set(words))}`",
        "works",
        "All ranks hash alike: PYTHONHASHSEED is 0 unless you set it.",
    ),
    "Random augmentation with the same seed on all ranks": Mistake(
        "`torch.manual_seed(0)`",
        "unknown",
        "Equal seeds are right for the weights, and wrong for augmentation and dropout.",
        "Broadcast the weights, and then call `torch.manual_seed(seed + hvd.rank())`.",
    ),
}

HOROVOD = {
    "Horovod is used before `hvd.init()`": Mistake(
        "`hvd.rank()`",
        "error",
        "Horovod has not been initialized; use hvd.init().",
    ),
    "No Horovod at all": Mistake(
        "a training loop for one process",
        "warned",
        "because the gradients are not averaged: the SGD that steps there is not the optimizer",
        "Call `hvd.init()`, wrap the optimizer, broadcast the weights.",
    ),
    "No broadcast of the first weights": Mistake(
        "no `hvd.broadcast_parameters(...)`",
        "warned",
        "begins with other weights than rank 0",
        "The message names it, for PyTorch and Keras.",
    ),
    "Only rank 0 loads the pretrained weights": Mistake(
        "`hvd.broadcast_parameters(...); if hvd.rank() == 0: model.load_state_dict(...)`",
        "warned",
        "begins with other weights than rank 0",
        "Broadcast after the weights are loaded.",
    ),
    "No `DistributedOptimizer`": Mistake(
        "`optimizer = SGD(model.parameters())`",
        "warned",
        "because the gradients are not averaged: the SGD that steps there is not the optimizer",
        "`hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())`",
    ),
    "The optimizer is wrapped, and the plain one steps": Mistake(
        "`hvd.DistributedOptimizer(optimizer); optimizer.step()`",
        "warned",
        "because the gradients are not averaged: the SGD that steps there is not the optimizer",
        "Use the optimizer that `DistributedOptimizer` returns.",
    ),
    "The optimizer is wrapped twice": Mistake(
        "`hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer))`",
        "error",
        "is distributed already: call DistributedOptimizer only once",
    ),
    "No `DistributedOptimizer` in Keras": Mistake(
        '`model.compile("sgd", "mse")`',
        "warned",
        "because the gradients are not averaged: the SGD that steps there is not the optimizer",
        "`model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), ...)`",
    ),
    "No `DistributedGradientTape` in a TensorFlow loop of your own": Mistake(
        "`tape.gradient(loss, weights)`",
        "unknown",
        "Steps run in a graph, which Python does not see.",
        "`hvd.DistributedGradientTape(tape)`; call `check_weights` after each epoch, with "
        '`DebugConfig(weight_check="epoch")`.',
    ),
    "Weights are different on purpose": Mistake(
        "each rank trains a model of its own",
        "works",
        "With `DebugConfig(weight_check=None)` nothing is compared.",
    ),
    "The learning rate differs by rank": Mistake(
        "`ReduceLROnPlateau(optimizer).step(own_loss)`",
        "warned",
        "has another learning rate than rank 0",
        'Average the loss first: `agree(loss, "mean")`; in Keras use '
        "`hvd.callbacks.ReduceLROnPlateau`.",
    ),
    "Only rank 0 loads the optimizer's state": Mistake(
        "`if hvd.rank() == 0: optimizer.load_state_dict(...)`",
        "warned",
        "Its state may differ by rank, for example because only rank 0 has loaded it",
        "Call `hvd.broadcast_optimizer_state(optimizer, root_rank=0)` after that.",
    ),
    "Weights are unfrozen or added after `DistributedOptimizer`": Mistake(
        "`for weight in backbone.parameters(): weight.requires_grad = True`",
        "works",
        "Their gradients are averaged, too.",
    ),
    "Only rank 0 loads weights into `DistributedDataParallel`": Mistake(
        "`model = DistributedDataParallel(model); if rank == 0: model.load_state_dict(...)`",
        "warned",
        "Load weights on every rank, or before DistributedDataParallel is made",
    ),
    "Weights are unfrozen after `DistributedDataParallel`": Mistake(
        "`for weight in backbone.parameters(): weight.requires_grad = True`",
        "warned",
        "some weights were frozen when DistributedDataParallel was made",
    ),
    "Every `backward()` before a step is inside `no_sync()`": Mistake(
        "`with parallel.no_sync(): loss.backward()`, then `optimizer.step()`",
        "warned",
        "the last backward() before a step was inside no_sync()",
    ),
    "The weights after `hvd.join()` are not broadcast": Mistake(
        "`hvd.join(); save_checkpoint(epoch, model=model)`",
        "warned",
        "because a rank that calls hvd.join() misses the steps which the others still make",
    ),
    "Ranks reduce tensors of different shapes": Mistake(
        "`hidden = random.choice([32, 64])`",
        "error",
        "The ranks gave one collective different tensors",
        "Let all ranks take rank 0's choice: `hidden = agree(hidden)`.",
    ),
    "Gradients are clipped before they are averaged": Mistake(
        "`loss.backward(); clip_grad_norm_(...); optimizer.step()`",
        "works",
        "They are averaged first, and `step` does not average again.",
    ),
    "Gradients are clipped by hand before they are averaged": Mistake(
        "`loss.backward(); for p in model.parameters(): p.grad.clamp_(-1, 1)`",
        "unknown",
        "Nothing of PyTorch's is called that could average first.",
        "`optimizer.synchronize()` before it, and the step in `optimizer.skip_synchronize()`.",
    ),
    "Gradients are clipped while they accumulate": Mistake(
        "`backward_passes_per_step=2`, and `clip_grad_norm_` after each `backward()`",
        "works",
        "`step` clips once, after the averaging.",
    ),
    "The norm of gradients is measured while they accumulate": Mistake(
        "`backward_passes_per_step=2`, and `get_total_norm` after each `backward()`",
        "warned",
        "get_total_norm measures gradients of which more are to be accumulated",
        "Call it once, after the last `backward()` of a step.",
    ),
    "The norm of gradients is measured of weights without an optimizer": Mistake(
        "`get_total_norm` of all gradients, where the optimizer has the head alone",
        "warned",
        "of weights that no DistributedOptimizer trains, and that are not averaged",
        "Call `clip_grad_norm_`, which averages them, or leave them out.",
    ),
    "AMP unscales gradients before they are averaged": Mistake(
        "`scaler.scale(loss).backward(); scaler.step(optimizer)`",
        "works",
        "They are averaged first, so all ranks skip the same steps.",
    ),
    "`zero_grad` between `backward` and `step`": Mistake(
        "`loss.backward(); optimizer.zero_grad(); optimizer.step()`",
        "warned",
        "a step had no gradients, because zero_grad() was called between backward() and step()",
    ),
    "Two optimizers, and a loss of one goes through the weights of both": Mistake(
        "`generator_loss.backward(); generator_optimizer.step(); critic_optimizer.zero_grad()`",
        "works",
        "The gradients of the critic that no step has used are dropped.",
    ),
    "Each rank chooses its own width": Mistake(
        "`width = random.choice([32, 64])`",
        "error",
        "Let all ranks take rank 0's choice: width = agree(width).",
    ),
    "A layer that some ranks leave out": Mistake(
        "`if hvd.rank() == 0: x = extra(x)`",
        "works",
        "Its gradient is 0 on the other ranks.",
    ),
    "The mean of whole numbers": Mistake(
        "`hvd.allreduce(torch.tensor(count))`",
        "unknown",
        "It is a whole number in PyTorch, and calls that only wait use it, too.",
        "`op=hvd.Sum`, or a tensor of floats.",
    ),
    "The result of a reduction is not used": Mistake(
        "`hvd.allreduce(loss)`",
        "unknown",
        "A call that only waits is the same code.",
        "`loss = hvd.allreduce(loss)`, or `hvd.allreduce_(loss)`, which changes the tensor.",
    ),
    "`zero_grad(set_to_none=True)`": Mistake(
        "`optimizer.zero_grad(set_to_none=True)`",
        "works",
        "Horovod's optimizer gets the argument, which it lacks by itself.",
    ),
    "Gradients are accumulated without saying so": Mistake(
        "`loss.backward()` twice before `optimizer.step()`",
        "works",
        "They are averaged once, in `step`. On GPUs and with more than 4 MB of weights, where "
        "averaging begins in `backward`, an error asks for `backward_passes_per_step=2`.",
    ),
    "Accumulated gradients are not divided": Mistake(
        "`backward_passes_per_step=4`, and the loss is not divided by 4",
        "unknown",
        "Horovod sums the passes; a larger step may be what you want.",
        "Divide the loss by the number of passes.",
    ),
    "A rank leaves a batch out": Mistake(
        "`if torch.isnan(loss): continue`",
        "error",
        "returned from main while rank 0 still waited in a collective",
        "Decide by a number that is equal on all ranks: `hvd.allreduce` the loss first.",
    ),
    "Batch normalization": Mistake(
        "its statistics are those of a rank's rows",
        "unknown",
        "Every data-parallel training has it; with `global_batch` a notice says so.",
        "`SyncBatchNorm` on GPUs, GroupNorm or LayerNorm.",
    ),
    "The learning rate is not scaled, or is scaled twice": Mistake(
        "`SGD(lr=0.1)`",
        "unknown",
        "The right rate depends on the training.",
        "Multiply it by `hvd.size()`, with a warm-up; not with `global_batch`.",
    ),
}

EVALUATION = {
    "`evaluate` in training mode": Mistake(
        "`evaluate(feed, measure)` without `model.eval()`",
        "warned",
        "in training mode, in which its Dropout behaves differently",
    ),
    "`model.eval()` is forgotten in a loop of your own": Mistake(
        "`with torch.no_grad(): model(x)`",
        "unknown",
        "Monte Carlo dropout is the same code.",
        "Use `evaluate`, which looks at the model.",
    ),
    "Metrics of rank 0 are taken for those of all ranks": Mistake(
        "`report(accuracy=own_accuracy)`",
        "unknown",
        "A number does not say which rows it comes from.",
        "`evaluate` on every rank, or `hvd.allreduce` first; in Keras `MetricAverageCallback`.",
    ),
    "A collective that only rank 0 calls": Mistake(
        "`if hvd.rank() == 0: evaluate(feed, measure)`",
        "error",
        "All ranks must call the same collectives the same number of times",
        "Call `evaluate` on every rank.",
    ),
    "One rank stops early": Mistake(
        "`if own_loss < best: return`",
        "error",
        "returned from main while rank 0 still waited in a collective",
        "Decide by a number that is equal on all ranks: `hvd.allreduce` it.",
    ),
}

PROCESSES = {
    "Arguments of `main` are misspelled": Mistake(
        "`runner.run(train, learning_rate=0.1)` for `def train(lr)`",
        "error",
        "main cannot be called as",
    ),
    "`main` uses `spark`": Mistake(
        "`def main(): spark.range(10)`",
        "error",
        " -> spark has the type pyspark.sql.",
        "Use Spark before `run`.",
    ),
    "`main` uses a DataFrame from outside": Mistake(
        "`def main(): df.count()`",
        "error",
        "Make it an argument of its own, run(main, train=df)",
    ),
    "`main` starts a Spark session": Mistake(
        "`def main(): SparkSession.builder.getOrCreate()`",
        "warned",
        "main starts a Spark session in the process of a rank",
    ),
    "`main` uses a lock, a file or a connection from outside": Mistake(
        "`log = open('log.txt'); def main(): log.write('x')`",
        "error",
        "Pass the path, and open the file inside main.",
    ),
    "`main` fills a list from outside": Mistake(
        "`losses = []; def main(): losses.append(0.1)`",
        "warned",
        "and returned nothing. Each rank has a copy of what main uses from outside",
    ),
    "`main` trains a model from outside": Mistake(
        "`model = Net(); def main(): train(model)`",
        "warned",
        "and returned nothing. Each rank has a copy of what main uses from outside",
    ),
    "A Spark UDF inside `main`": Mistake(
        "`def main(): df.select(udf(f)('x'))`",
        "error",
        "Make it an argument of its own, run(main, train=df)",
        "Apply it before `run`, and pass the DataFrame.",
    ),
    "`np` is larger than the number of slots": Mistake(
        "`HorovodRunner(np=64)`",
        "error",
        "np=64 asks for 64 slot(s)",
        "Use a smaller `np`, or a larger cluster.",
    ),
    "A module is not installed on the executors": Mistake(
        "`def main(): import mymodule`",
        "error",
        "ClusterConfig(ship_modules=[",
    ),
    "`main` reads a file of the driver's machine": Mistake(
        '`def main(): open("data/train.csv")`',
        "error",
        "exists on the driver's machine, but not for the rank on",
    ),
    "Ranks read what rank 0 has not written yet": Mistake(
        "`if hvd.rank() == 0: torch.save(words, path)`, and then `torch.load(path)`",
        "error",
        "another rank may have written it after this one looked for it",
        "`hvd.barrier()` between them.",
    ),
    "All ranks write the same file": Mistake(
        '`torch.save(model.state_dict(), "model.pt")`, `ModelCheckpoint`, `CSVLogger`',
        "warned",
        "of one host write the same file",
    ),
    "All ranks write logs for TensorBoard": Mistake(
        '`SummaryWriter("logs")`, `keras.callbacks.TensorBoard("logs")`',
        "warned",
        "write to the same folder of logs",
    ),
    "All ranks log to MLflow": Mistake(
        '`mlflow.log_metric("loss", loss)`',
        "warned",
        "main starts a run of MLflow on every rank",
    ),
    "`save_checkpoint` on all ranks": Mistake(
        "`save_checkpoint(state, step)`",
        "works",
        "Only rank 0 writes; call it on every rank.",
    ),
    "All ranks print in every step": Mistake(
        "`print(loss)`",
        "works",
        "Printing waits for nobody. By default only `log_to_driver` is shown; with "
        '`driver_log_verbosity="all"` equal lines of many ranks are shown once.',
    ),
    "`main` asks for input": Mistake(
        "`input()`, `breakpoint()`",
        "error",
        "which has no terminal",
        "Ask before `run`. To step through `main`, call it without HorovodRunner.",
    ),
    "The value cannot be sent back": Mistake(
        "`def main(): return threading.Lock()`",
        "error",
        "Return plain values, arrays or a state_dict.",
    ),
    "DataLoader workers that are forked after CUDA was used": Mistake(
        "`model.cuda(); DataLoader(gpu_dataset, num_workers=2)`",
        "error",
        "Cannot re-initialize CUDA in forked subprocess",
        '`DataLoader(..., multiprocessing_context="spawn")`, or a dataset on the CPU.',
    ),
    "All ranks download the same dataset": Mistake(
        '`MNIST("data", download=True)`',
        "unknown",
        "A download is like any other code.",
        "Download on local rank 0, and then `hvd.barrier()`.",
    ),
    'A script without `if __name__ == "__main__"`': Mistake(
        "`HorovodRunner(np=-2).run(main)` at the top of a file",
        "works",
        "Ranks do not import the script again.",
    ),
}

SECTIONS = {
    "Data": DATA,
    "Horovod": HOROVOD,
    "Evaluation": EVALUATION,
    "Processes, Spark and files": PROCESSES,
}
MISTAKES = {name: mistake for section in SECTIONS.values() for name, mistake in section.items()}
