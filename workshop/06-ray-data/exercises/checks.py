"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from common.checks import expect

Batch = dict[str, np.ndarray]


def _batch(num_rows: int, seed: int = 0) -> Batch:
    images = np.random.default_rng(seed).integers(0, 256, (num_rows, 1, 28, 28)).astype(np.uint8)
    images[::2] //= 2  # so that no two parts have the same range
    return {"id": np.arange(num_rows), "image": images}


def _rows(batch: Batch, first: int, last: int) -> Batch:
    return {name: values[first:last] for name, values in batch.items()}


def check_1(answer: ModuleType) -> None:
    batch = _batch(6)
    whole = answer.scale(batch)
    expect(isinstance(whole, dict) and set(whole) == {"id", "image"}, "return the whole batch, with its ids")
    expect(whole["image"].dtype == np.float32, f"the images are {whole['image'].dtype}, float32 was asked for")
    alone = answer.scale(_rows(batch, 2, 3))["image"][0]
    expect(np.array_equal(whole["image"][2], alone), "row 2 has other pixels when it is alone in its batch")
    right = batch["image"] / 127.5 - 1
    expect(np.allclose(whole["image"], right, atol=1e-5), "0 should become -1, and 255 should become 1")


def check_2(answer: ModuleType) -> None:
    batch = _batch(200)
    before = batch["image"].copy()
    images = answer.flip(batch, 3, 0)["image"]
    expect(np.array_equal(batch["image"], before), "the batch that was given has changed: flip a copy")
    is_flipped = np.array([np.array_equal(new, old[..., ::-1]) for new, old in zip(images, before, strict=True)])
    is_same = np.array([np.array_equal(new, old) for new, old in zip(images, before, strict=True)])
    expect(bool((is_flipped | is_same).all()), "an image is neither as it was nor flipped left to right")
    expect(60 <= is_flipped.sum() <= 140, f"{is_flipped.sum()} of 200 images are flipped, about half were asked for")
    again = answer.flip(batch, 3, 0)["image"]
    expect(np.array_equal(again, images), "the same rows of the same epoch came out otherwise the second time")
    part = answer.flip(_rows(batch, 50, 90), 3, 0)["image"]
    expect(np.array_equal(part, images[50:90]), "rows 50 to 89 come out otherwise in a smaller batch: draw by the id")
    other = answer.flip(batch, 3, 1)["image"]
    expect(not np.array_equal(other, images), "epoch 1 has the same flips as epoch 0")
    seeded = answer.flip(batch, 4, 0)["image"]
    expect(not np.array_equal(seeded, images), "another seed has the same flips")
