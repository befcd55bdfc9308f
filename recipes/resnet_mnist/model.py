"""ResNet-18 for one-channel images, written for one device; its state_dict has torchvision's names."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(nn.Module):
    def __init__(self, num_classes: int = 10, width_divisor: int = 1) -> None:
        super().__init__()
        if width_divisor < 1 or 64 % width_divisor:
            raise ValueError(f"the width divisor must divide 64, which {width_divisor} does not")
        width = 64 // width_divisor
        self.conv1 = nn.Conv2d(1, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)
        self.fc = nn.Linear(8 * width, num_classes)
        self.apply(_init_conv)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.maxpool(relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.fc(x.mean((2, 3)))
        return x


def _stage(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1))


def _init_conv(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
