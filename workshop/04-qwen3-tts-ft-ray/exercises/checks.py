"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from common.checks import expect, expect_close

NUM_CODEBOOKS, CODEBOOK = 16, 32


def check_1(answer: ModuleType) -> None:
    for num_text, num_frames in [(1, 1), (4, 6), (7, 2)]:
        tokens = [11, 12, 13, *range(20, 20 + num_text)]
        codes = [[100 * frame + book for book in range(NUM_CODEBOOKS)] for frame in range(1, num_frames + 1)]
        text, codec, labels = (list(channel) for channel in answer.layout(list(tokens), codes))
        n, length = len(tokens), len(tokens) + num_frames + 8
        shape = f"{n} tokens and {num_frames} frames"
        expect(text[8 + n - 3 : 8 + n - 2] == [answer.TTS_EOS], f"{shape}: the text is not followed by TTS_EOS")
        found = (len(text), len(codec), len(labels))
        expect(found == (length,) * 3, f"{shape}: the lists have {found} positions, {length} each were expected")
        expect(
            text[:8] == [11, 12, 13] + [answer.TTS_PAD] * 4 + [answer.TTS_BOS], "text: positions 0 to 7 are not right"
        )
        expect(text[8 : 5 + n] == tokens[3:], "text: the tokens after the role's stand at position 8 and after")
        expect(set(text[6 + n :]) == {answer.TTS_PAD}, "text: beside the codes there is TTS_PAD only")
        begin = [answer.NOTHING] * 3 + [answer.NOTHINK, answer.THINK_BOS, answer.THINK_EOS, answer.SPEAKER, answer.PAD]
        expect(codec[:8] == begin, "codec: positions 0 to 7 are not right")
        expect(set(codec[8 : 6 + n]) == {answer.PAD}, "codec: beside the text and its end there is PAD only")
        expect(codec[6 + n] == answer.BOS, f"codec: BOS stands at position {6 + n}, after the text's end")
        frames = [frame[0] for frame in codes]
        expect(codec[7 + n :] == [*frames, answer.EOS], "codec: codebook 0 of each frame follows BOS, then EOS")
        own_place = [answer.IGNORE] * (7 + n) + [*frames, answer.EOS]
        expect(labels == own_place, "labels: each stands at its code's own position; the loss shifts once by itself")


def check_2(answer: ModuleType) -> None:
    made = torch.Generator().manual_seed(4)
    length, num_frames, first_frame, width = 19, 5, 12, 8
    codes = torch.randint(1, CODEBOOK, (num_frames, NUM_CODEBOOKS), generator=made)
    labels = torch.full((length,), -100)
    labels[first_frame : first_frame + num_frames] = codes[:, 0]
    labels[first_frame + num_frames] = 0  # the end; one position of padding follows
    hidden = torch.arange(float(length))[:, None].expand(length, width)  # a state is known by its position
    given: list[Tensor] = []

    def sub_talker(states: Tensor, frames: Tensor) -> Tensor:
        given.append(states)
        expect(
            frames.shape == codes.shape, f"the sub-talker gets codes {tuple(codes.shape)}, not {tuple(frames.shape)}"
        )
        return _certain(frames[:, 1:])

    sure = torch.zeros(length, CODEBOOK)
    known = labels[1:] >= 0
    sure[:-1][known] = _certain(labels[1:][known])
    found = float(answer.loss(hidden, sure, labels, codes, first_frame, sub_talker))
    positions = [int(state[0]) for state in given[-1]] if given else []
    expect(bool(positions), "the sub-talker was not asked")
    before = list(range(first_frame - 1, first_frame - 1 + num_frames))
    expect(
        positions == before,
        f"the sub-talker got the states of positions {positions}, the frames are predicted at {before}",
    )
    expect(
        found < 1e-3, f"predictions that are all right have the loss {found:.3f}: something is shifted once too often"
    )
    guess = torch.zeros(length, CODEBOOK)
    found = float(answer.loss(hidden, guess, labels, codes, first_frame, sub_talker))
    expect_close(
        found, float(torch.tensor(float(CODEBOOK)).log()), "the talker's part, with no idea of the codes", 1e-3
    )
    found = float(
        answer.loss(hidden, sure, labels, codes, first_frame, lambda *_: torch.zeros(num_frames, 15, CODEBOOK))
    )
    expect_close(found, 0.3 * float(torch.tensor(float(CODEBOOK)).log()), "0.3 x the sub-talker's part", 1e-3)


def _certain(codes: Tensor) -> Tensor:
    """Logits that leave no doubt."""
    return 50.0 * torch.nn.functional.one_hot(codes, CODEBOOK).float()
