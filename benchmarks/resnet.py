"""ResNet-20 for images of 32 x 32, as in He et al. 2016."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions and a short way around them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.main = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of a batch."""
        out: torch.Tensor = torch.relu(self.main(x) + self.short(x))
        return out


def resnet20() -> nn.Module:
    """A network with the same weights each time."""
    torch.manual_seed(0)
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(*pair) for pair in pairwise(widths)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *blocks, *head)
