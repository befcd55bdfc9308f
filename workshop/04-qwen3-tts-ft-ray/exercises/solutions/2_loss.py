"""Which hidden state predicts which code?"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

SubTalker = Callable[[Tensor, Tensor], Tensor]


def loss(
    hidden: Tensor, logits: Tensor, labels: Tensor, codes: Tensor, first_frame: int, sub_talker: SubTalker
) -> Tensor:
    talker = F.cross_entropy(logits[:-1], labels[1:])
    states = hidden[first_frame - 1 : first_frame - 1 + len(codes)]
    residual = sub_talker(states, codes)
    sub = F.cross_entropy(residual.flatten(0, 1), codes[:, 1:].flatten())  # its outputs are codebooks 1 to 15 already
    return talker + 0.3 * sub
