"""What does the talker read, and what is it to predict, at each position?"""

from __future__ import annotations

TTS_PAD, TTS_BOS, TTS_EOS = 1001, 1002, 1003
NOTHING, SPEAKER, IGNORE = -1, -2, -100
NOTHINK, THINK_BOS, THINK_EOS, PAD, BOS, EOS = 2151, 2152, 2153, 2148, 2149, 2150


def layout(tokens: list[int], codes: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    role, text = tokens[:3], [*tokens[3:], TTS_EOS]
    frames = [frame[0] for frame in codes]
    before = [NOTHING] * 3 + [NOTHINK, THINK_BOS, THINK_EOS, SPEAKER, PAD] + [PAD] * len(text)
    text_channel = role + [TTS_PAD] * 4 + [TTS_BOS] + text + [TTS_PAD] * (len(frames) + 2)
    codec_channel = [*before, BOS, *frames, EOS]
    # Each label at its own position: the loss does the one shift that there is.
    labels = [IGNORE] * (len(before) + 1) + [*frames, EOS]
    return text_channel, codec_channel, labels
