"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

import copy
from types import ModuleType

import numpy as np
import torch
from torch import nn

from common.checks import expect, expect_close
from common.cifar10 import MEAN, STD
from common.resnet import ResNet18


def check_1(answer: ModuleType) -> None:
    photos = np.random.default_rng(0).integers(0, 256, (4, 20, 32, 3), dtype=np.uint8)
    before = photos.copy()
    images = answer.prepare(photos)
    expect(tuple(images.shape) == (4, 3, 20, 32), f"the shape is {tuple(images.shape)}; (4, 3, 20, 32) was expected")
    expect(images.dtype == torch.float32, f"the type is {images.dtype}; torch.float32 was expected")
    expect(bool((photos == before).all()), "the photos themselves were changed")
    for colour, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        right = (photos[..., colour].astype(np.float64) / 255 - mean) / std
        found = images[:, colour].numpy()
        if np.abs(found - right).max() < 1e-4:
            continue
        expect(abs(found.max()) < 10, f"values go up to {found.max():.0f}: pixels are to lie between 0 and 1 first")
        same_values = np.allclose(np.sort(images.numpy(), None), np.sort(_right(photos), None), atol=1e-4)
        expect(not same_values, "the values are right but stand elsewhere: reshape moves no axis, permute does")
        expect_close(float(found.mean()), float(right.mean()), f"the mean of colour {colour}", 1e-3)
        expect(False, f"colour {colour} is not right: subtract its own mean, then divide by its own deviation; permute")


def _right(photos: np.ndarray) -> np.ndarray:
    return ((photos / 255 - MEAN) / STD).transpose(0, 3, 1, 2)


def check_2(answer: ModuleType) -> None:
    torch.manual_seed(0)
    model = ResNet18(width_divisor=16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training: not the statistics of any one batch
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.5, 2)
    images = torch.randn(24, 1, 28, 28)
    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        right = reference(images).argmax(1)
    before = copy.deepcopy(model.state_dict())
    model.train()
    found = answer.predict(model, images)
    expect(tuple(found.shape) == (24,), f"the shape is {tuple(found.shape)}; one class an image was expected")
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    expect(
        not changed, f"the model was changed by the prediction: {', '.join(changed[:2])} …; model.eval() prevents it"
    )
    expect(torch.equal(found, right), "the classes are not those of the model in eval mode")
    alone = torch.cat([answer.predict(model, image[None]) for image in images])
    expect(torch.equal(found, alone), "an image alone gets another class than among others")
    expect(model.training, "the model was training before and is not any more: training goes on after a validation")
    model.eval()
    answer.predict(model, images)
    expect(not model.training, "the model was in eval mode before and is not any more")
    seen: list[bool] = []
    handle = model.register_forward_hook(lambda _, __, output: seen.append(output.requires_grad))
    answer.predict(model, images)
    handle.remove()
    expect(not any(seen), "a graph for a backward pass was built: torch.no_grad() or inference_mode() saves its memory")


def check_3(answer: ModuleType) -> None:
    cases = [
        ([0.0, 1.0, 2.0], 8, 0.5, [[0.0], [1.0], [2.0]], "none came while another was waiting"),
        ([0.0, 0.1, 0.2, 0.3], 8, 0.5, [[0.0, 0.1, 0.2, 0.3]], "all came within 0.5 s of the first"),
        ([0.0, 0.1, 0.2, 0.3, 0.35], 2, 0.5, [[0.0, 0.1], [0.2, 0.3], [0.35]], "a batch is full with 2"),
        ([0.0, 0.4, 0.8, 1.2], 8, 0.5, [[0.0, 0.4], [0.8, 1.2]], "the first of a batch starts the clock, not the last"),
        ([0.0, 0.5], 8, 0.5, [[0.0], [0.5]], "at 0.5 s the batch is closed"),
        ([0.0, 0.0, 0.0], 8, 0.0, [[0.0], [0.0], [0.0]], "with no time to wait each is alone"),
        ([], 8, 0.5, [], "no request, no batch"),
    ]  # fmt: skip
    for arrivals, max_size, wait_s, right, hint in cases:
        found = [list(batch) for batch in answer.batches(list(arrivals), max_size, wait_s)]
        call = f"batches({arrivals}, max_size={max_size}, wait_s={wait_s})"
        expect(found == right, f"{call} gave {found}, expected {right}: {hint}")
