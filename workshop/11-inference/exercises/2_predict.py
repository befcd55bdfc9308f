"""Exercise 2: an answer that depends on the image alone.

Write `predict(model, images)`: the class of each image (int64 [n]). An image gets the same answer alone and among
others; the model is afterwards as it was: the same weights, the same running means, training or not as before; and the
answer holds no graph for a backward pass.

What stands here gives an image other logits in other company, and changes the model a little at each call.
"""

from __future__ import annotations

from torch import Tensor, nn


def predict(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).argmax(1)
