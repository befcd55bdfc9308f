"""Which hidden state predicts which code?

The talker read one utterance of L positions; its k frames begin at position `first_frame`.

- hidden [L, width]: the talker's states; logits [L, vocabulary]: its predictions of codebook 0, of the *next* position
- labels [L]: codebook 0 of each frame, and the end, at their own positions; -100 elsewhere, which is not trained
- codes [k, 16]; sub_talker(states [k, width], codes) gives logits [k, 15, codebook] of codebooks 1 to 15, of that frame

Return talker loss + 0.3 x sub-talker loss, both means of the cross-entropy. When speech is generated, the sub-talker
gets the state that predicted the frame's codebook 0: it has not read the frame. What stands here gives it the state at
the frame, which has read the answer, and shifts what needs no shift.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

SubTalker = Callable[[Tensor, Tensor], Tensor]


def loss(
    hidden: Tensor, logits: Tensor, labels: Tensor, codes: Tensor, first_frame: int, sub_talker: SubTalker
) -> Tensor:
    talker = F.cross_entropy(logits[:-2], labels[2:])
    states = hidden[first_frame : first_frame + len(codes)]
    residual = sub_talker(states, codes)
    sub = F.cross_entropy(residual[:, :-1].flatten(0, 1), codes[:, 2:].flatten())
    return talker + 0.3 * sub
