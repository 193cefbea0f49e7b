"""Batch normalization of torch with the statistics of all ranks' rows, on CPUs and GPUs.

``torch.nn.SyncBatchNorm`` and Horovod's need GPUs. Here a rank counts as many rows as it has: a
step equals that of one process with all rows.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.modules.batchnorm import _BatchNorm


class CountedRows:
    """Whether a batch's rows count: a rank without rows takes part with one of others."""

    count = True  # set before each batch


def synchronize(model: torch.nn.Module) -> CountedRows:
    """Let the batch normalization of a model have the statistics of all ranks, in place.

    Returns:
        What to set for batches without rows of their own.
    """
    rows = CountedRows()
    for number, layer in enumerate(model.modules()):
        if isinstance(layer, _BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm):
            _synchronize(layer, f"batch normalization {number}", rows)
    return rows


def _synchronize(layer: Any, name: str, rows: CountedRows) -> None:
    plain = layer.forward

    def forward(values: torch.Tensor) -> torch.Tensor:
        if not (layer.training or layer.running_mean is None):
            result: torch.Tensor = plain(values)
            return result
        layer._check_input_dim(values)
        normalized, mean, variance, count = _Normalize.apply(
            values, layer.weight, layer.bias, layer.eps, name, rows.count
        )
        if layer.training and layer.running_mean is not None:
            layer.num_batches_tracked.add_(1)
            momentum = layer.momentum
            if momentum is None:
                momentum = 1 / float(layer.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
        return normalized

    layer.forward = forward


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    """Normalizes each channel by the mean and the variance over the rows of all ranks."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them in order
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
        counts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        over = [0, *range(2, values.dim())]
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        own = wide.numel() // wide.shape[1] if counts else 0
        variances, means = torch.var_mean(wide, dim=over, correction=0)
        here = torch.stack([means, variances, torch.full_like(means, float(own))])
        # Means, variances and numbers of rows of all ranks: (ranks, 3, channels).
        means, variances, numbers = hvd.allgather(here[None], name=name).unbind(1)
        count = numbers.sum(0)
        mean = (means * numbers).sum(0) / count
        spread = (variances + (means - mean).square()) * numbers
        variance = spread.sum(0) / count
        shape = [1, -1, *[1] * (values.dim() - 2)]
        inverse = torch.rsqrt(variance + eps)
        centred = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(centred, weight, inverse, count)
        ctx.name, ctx.over, ctx.shape = name, over, shape
        result = centred if weight is None else centred * weight.view(shape)
        if bias is not None:
            result = result + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(values.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        centred, weight, inverse, count = ctx.saved_tensors
        wide = gradient.to(centred.dtype)
        sums = torch.stack([wide.sum(ctx.over), (wide * centred).sum(ctx.over)])
        everywhere = hvd.allreduce(sums, name=f"gradient of {ctx.name}", op=hvd.Sum) / count
        mean, projection = (each.view(ctx.shape) for each in everywhere)
        scale = inverse if weight is None else inverse * weight
        passed = (wide - mean - centred * projection) * scale.view(ctx.shape)
        bias_gradient, weight_gradient = sums
        return (
            passed.to(gradient.dtype),
            weight_gradient if ctx.needs_input_grad[1] else None,
            bias_gradient if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )
