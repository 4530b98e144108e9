"""ResNet-50 in plain torch: the training step of the GPU benchmarks.

He et al. 2015, "Deep Residual Learning", with the stride in the 3x3 convolution ("v1.5"):
25,557,032 parameters for 1,000 classes, with the layers of torchvision's resnet50. torchvision may
not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

EXPANSION = 4
BLOCKS = (3, 4, 6, 3)
STEM = 64


class Bottleneck(nn.Module):
    """A block: 1x1 down, 3x3, 1x1 up to 4 x `inner` channels, with the input added."""

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        out = EXPANSION * inner
        self.body = nn.Sequential(
            *_convolution(channels, inner, size=1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, size=3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, out, size=1),
        )
        same = stride == 1 and channels == out
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution(channels, out, size=1, stride=stride))
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.body(images) + self.shortcut(images))
        return out


def _convolution(channels: int, out: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, out, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(out)]


def resnet50(*, classes: int = 1000, stem: int = STEM) -> nn.Module:
    """Build a model from images (n, 3, h, w), normalised, to logits (n, classes).

    stem: channels of the first layer; fewer than 64 make a small model of the same depth, for
    tests.
    """
    layers: list[nn.Module] = [
        *_convolution(3, stem, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = stem
    for number, blocks in enumerate(BLOCKS):
        inner = stem * 2**number
        for block in range(blocks):
            stride = 2 if number and not block else 1
            layers.append(Bottleneck(channels, inner, stride=stride))
            channels = EXPANSION * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def training_step(
    model: nn.Module, *, device: torch.device, learning_rate: float = 0.1
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return step(images, labels): forward, loss, backward, SGD with momentum.

    Memory is channels-last; on CUDA, autocast uses bfloat16. The step returns the loss as a tensor
    without waiting for the device.
    """
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss: torch.Tensor = loss_of(model(images), labels.to(device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step
