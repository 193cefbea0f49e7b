"""ResNet-50 for images, as in He et al. 2016, with the stride in the middle of a block."""

from __future__ import annotations

import torch
from torch import nn

_BLOCKS = (3, 4, 6, 3)  # of a stage; each stage is twice as wide as the one before
_EXPANSION = 4


class Block(nn.Module):  # type: ignore[misc]
    """Three convolutions and a short way around them; the output has four times the width."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * _EXPANSION
        self.main = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.short = nn.Sequential(projection, nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of a batch."""
        out: torch.Tensor = torch.relu(self.main(x) + self.short(x))
        return out


def resnet50(width: int = 64) -> nn.Module:
    """Return the network for 1,000 classes, with the same weights each time.

    A width of 64 is that of ResNet-50 with its 25.6 million weights.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, blocks in enumerate(_BLOCKS):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(Block(channels, width << stage, stride))
            channels = (width << stage) * _EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)
