"""What does the talker read, and what is it to predict, at each position?

`tokens`: `<|im_start|>assistant\\n{text}<|im_end|>\\n<|im_start|>assistant\\n` without its last 5: 3 tokens of the
role, then the text's. `codes` [k][16]: the frames of its audio. Return three lists of the same length:

- text: the role; TTS_PAD up to position 6; TTS_BOS at 7; the text; TTS_EOS; TTS_PAD to the end
- codec: NOTHING beside the role; NOTHINK, THINK_BOS, THINK_EOS, SPEAKER, PAD; PAD beside the text and TTS_EOS; BOS;
  codebook 0 of each frame; EOS
- labels: codebook 0 of each frame, and EOS, each at its own position; IGNORE elsewhere

The loss compares the output of a position with the label of the next one. What stands here shifts the labels, too, as
the first fine-tuning code of this model did: its voices spoke too fast. And it leaves out what tells the end of the
text.
"""

from __future__ import annotations

TTS_PAD, TTS_BOS, TTS_EOS = 1001, 1002, 1003
NOTHING, SPEAKER, IGNORE = -1, -2, -100
NOTHINK, THINK_BOS, THINK_EOS, PAD, BOS, EOS = 2151, 2152, 2153, 2148, 2149, 2150


def layout(tokens: list[int], codes: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    role, text = tokens[:3], tokens[3:]
    frames = [frame[0] for frame in codes]
    before = [NOTHING] * 3 + [NOTHINK, THINK_BOS, THINK_EOS, SPEAKER, PAD] + [PAD] * len(text)
    text_channel = role + [TTS_PAD] * 4 + [TTS_BOS] + text + [TTS_PAD] * (len(frames) + 2)
    codec_channel = [*before, BOS, *frames, EOS]
    labels = [IGNORE] * len(before) + frames + [EOS] + [IGNORE]
    return text_channel, codec_channel, labels
