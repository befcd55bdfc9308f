"""The training sample: what stands at each position of the talker's two channels, as generation puts it.

position   0 1 2   3 ...                     8 ...              then        then the k frames
text       role    pad pad pad pad   bos     text ...  eos      pad         pad ... pad
codec      -       nothink think_bos         pad  ...  pad      codec_bos   frame 0 ... frame k-1
                   think_eos speaker pad
predicts                                                        frame 0     frame 1 ... end of speech

With a language the tag is think, think_bos, language, think_eos: one position more. `streaming` hands the text over
while it is spoken, a token a frame: its first token stands at codec_bos, the others and eos at the frames.

A position predicts what comes next, so its label is the next frame's first code; the sub-talker then gets the hidden
state of that same position, which has not seen the frame, and the frame's codes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NO_LABEL = -100
ROLE_TOKENS = 3
"""`<|im_start|>assistant\\n`"""
CLOSING_TOKENS = 5
"""`<|im_end|>\\n<|im_start|>assistant\\n`, which generation cuts off."""

ROUND = 8
"""Batches are filled up to a multiple: kernels are prepared for each shape anew, and like round ones better."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a model gives to what is neither text nor a code."""

    tts_pad: int
    tts_bos: int
    tts_eos: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int
    languages: dict[str, int]

    @classmethod
    def of(cls, config: Any) -> Vocabulary:
        """From a Qwen3TTSConfig."""
        talker = config.talker_config
        return cls(
            config.tts_pad_token_id,
            config.tts_bos_token_id,
            config.tts_eos_token_id,
            talker.codec_pad_id,
            talker.codec_bos_id,
            talker.codec_eos_token_id,
            talker.codec_think_id,
            talker.codec_nothink_id,
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
            dict(talker.codec_language_id or {}),
        )

    def tag(self, language: str) -> list[int]:
        """What tells the talker the language; `auto` leaves it to the text."""
        if language == "auto":
            return [self.nothink, self.think_bos, self.think_eos]
        if language not in self.languages:
            raise ValueError(
                f"language {language!r} is not one of the model's: auto, {', '.join(sorted(self.languages))}"
            )
        return [self.think, self.think_bos, self.languages[language], self.think_eos]


def prompt(text: str) -> str:
    """The text as the tokenizer gets it."""
    return f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"


def build_sample(
    prompt_ids: Sequence[int],
    codes: np.ndarray,
    speaker_id: int,
    vocabulary: Vocabulary,
    language: str = "auto",
    streaming: bool = False,
) -> dict[str, Tensor]:
    """One utterance's channels: `prompt_ids` as tokenized, `codes` [frames][codebooks], `speaker_id` a codec id."""
    v = vocabulary
    role, text = list(prompt_ids[:ROLE_TOKENS]), [*prompt_ids[ROLE_TOKENS:-CLOSING_TOKENS], v.tts_eos]
    tag = [*v.tag(language), speaker_id, v.codec_pad]
    frames = torch.as_tensor(np.asarray(codes), dtype=torch.long)
    num_frames, num_codebooks = frames.shape
    before = [*tag, v.codec_bos] if streaming else [*tag, *[v.codec_pad] * len(text), v.codec_bos]
    start = len(role) + len(before)
    length = start + num_frames
    text_ids = [*role, *[v.tts_pad] * (len(tag) - 1), v.tts_bos, *text][:length]
    text_ids += [v.tts_pad] * (length - len(text_ids))
    labels = torch.full((length,), NO_LABEL)
    labels[start - 1 : -1] = frames[:, 0]
    labels[-1] = v.codec_eos
    all_codes = torch.zeros(length, num_codebooks, dtype=torch.long)
    all_codes[start:] = frames
    return {
        "text_ids": torch.tensor(text_ids),
        "codec_ids": torch.tensor([*[v.codec_pad] * len(role), *before, *frames[:, 0].tolist()]),
        "codes": all_codes,
        "labels": labels,
        "length": torch.tensor(length),
        "start": torch.tensor(start),
        "role": torch.tensor(len(role)),
    }


def collate(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """Utterances side by side, filled up at the end: attention is causal, so that changes nothing before it."""
    longest = -(-max(int(sample["length"]) for sample in samples) // ROUND) * ROUND
    batch: Batch = {}
    for name, filler in (("text_ids", 0), ("codec_ids", 0), ("codes", 0), ("labels", NO_LABEL)):
        batch[name] = torch.stack([_filled(sample[name], longest, filler) for sample in samples])
    for name in samples[0]:
        if name not in batch:
            batch[name] = torch.stack([sample[name] for sample in samples])
    return batch


def _filled(values: Tensor, length: int, filler: int) -> Tensor:
    if len(values) == length:
        return values
    rest = torch.full((length - len(values), *values.shape[1:]), filler, dtype=values.dtype)
    return torch.cat([values, rest])
