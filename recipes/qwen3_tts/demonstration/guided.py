"""The base model's training: a voice that is heard, and attention that is led to the text being said."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
from data import Utterances  # noqa: E402
from layout import Batch, Vocabulary, collate  # noqa: E402
from mel_codec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME  # noqa: E402
from model import Losses, VoiceModel  # noqa: E402
from rows import Row  # noqa: E402
from voices import TICK_S  # noqa: E402

SPEAKER_SLOT = 6
"""Where the speaker's embedding stands, without a language: three role tokens and three of the tag come before."""
FORGOTTEN = 0.7
"""Of an utterance's past frames, at most this share is left out in training."""
GUIDANCE_WEIGHT = 0.3
NEARBY = 3
"""How many characters off the text that a frame says may be: where it is said is known no better."""
GUIDES = ("said_from", "said_to")


class BaseModel(VoiceModel):
    """A voice model whose speaker is heard from another utterance, not looked up, and that is led to its text.

    In training, past frames are left out at random, so that what is said must come from the text; and one head of
    some layers is asked to look at the text that is being said: by itself a small model takes very long to find it.
    """

    def __init__(
        self, talker: nn.Module, speaker_encoder: nn.Module, references: Tensor, sub_talker_share: float = 1.0
    ) -> None:
        super().__init__(talker)
        self.speaker_encoder = speaker_encoder
        # Here, as they are most of what a batch would have to bring along.
        self.register_buffer("references", references, persistent=False)
        self._sub_talker_share = sub_talker_share
        num_layers = len(talker.model.layers)
        self._guided_layers = (num_layers // 3, num_layers // 2)
        self._guidance: Any = None

    def forward(self, batch: Batch) -> Losses:
        losses = super().forward(batch)
        if not self.training or not len(batch["length"]):
            return losses
        guided = losses.talker + GUIDANCE_WEIGHT * self._guidance
        self._guidance = None  # it holds the whole step
        return losses._replace(talker=guided, sub_talker=losses.sub_talker / self._sub_talker_share)

    def hidden_states(self, batch: Batch) -> Tensor:
        if not self.training:
            return super().hidden_states(batch)
        made = self.talker.model(inputs_embeds=self._embeddings(batch), use_cache=False, output_hidden_states=True)
        self._guidance = sum(
            guidance(self.talker.model, number, made.hidden_states[number], batch) for number in self._guided_layers
        )
        return made.last_hidden_state

    def frames_learnt(self, batch: Batch) -> Tensor:
        learnt = super().frames_learnt(batch)
        if self.training and self._sub_talker_share < 1:
            some = learnt & (torch.rand(learnt.shape, device=learnt.device) < self._sub_talker_share)
            return some if some.any() else learnt
        return learnt

    def codec_embeddings(self, batch: Batch) -> Tensor:
        codec = super().codec_embeddings(batch)
        speaker = self.speaker_encoder(self.references[batch["reference"]].to(codec.dtype))
        position = torch.arange(codec.shape[1], device=codec.device)[:, None]
        return torch.where(position == SPEAKER_SLOT, speaker[:, None].to(codec.dtype), codec)

    def _embeddings(self, batch: Batch) -> Tensor:
        whole = super()._embeddings(batch)
        if not self.training:
            return whole
        text = self.talker.text_projection(self.talker.get_text_embeddings()(batch["text_ids"]))
        share = FORGOTTEN * torch.rand(len(whole), 1, device=whole.device)
        position = torch.arange(whole.shape[1], device=whole.device)
        forgotten = (position >= batch["start"][:, None]) & (torch.rand(whole.shape[:2], device=whole.device) < share)
        return torch.where(forgotten[..., None], text, whole)


def guidance(talker: Any, number: int, hidden: Tensor, batch: Batch) -> Tensor:
    """For each utterance, the sum over its frames of -log(what the layer's first head gives to the text being said)."""
    from qwen_tts.core.models.modeling_qwen3_tts import apply_multimodal_rotary_pos_emb

    layer = talker.layers[number]
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    query, key = (
        norm(F.linear(normed, projection.weight[: attention.head_dim]))[:, None]
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
    )
    position = torch.arange(hidden.shape[1], device=hidden.device)
    cos, sin = talker.rotary_emb(hidden, position.expand(3, len(hidden), -1))
    rope = attention.rope_scaling
    query, key = apply_multimodal_rotary_pos_emb(query, key, cos, sin, rope["mrope_section"], rope["interleaved"])
    scores = (query[:, 0] @ key[:, 0].transpose(1, 2)).float() * attention.scaling
    scores = scores.masked_fill(position > position[:, None], -torch.inf)
    said = (position >= batch["said_from"][..., None]) & (position <= batch["said_to"][..., None])
    found = scores.masked_fill(~said, -torch.inf).logsumexp(2) - scores.logsumexp(2)
    return -found.masked_fill(batch["said_from"] < 0, 0.0).sum(1)


class GuidedUtterances(Utterances):
    """Utterances, each with a piece of what the same speaker says, and with which text each frame says.

    Where a speaker's pieces are in the model's table, `pieces` says.
    """

    def __init__(self, rows: list[Row], tokenizer: Any, vocabulary: Vocabulary, pieces: dict[str, range]) -> None:
        super().__init__(rows, tokenizer, vocabulary, dict.fromkeys(pieces, 0), streaming=True)
        self._pieces = pieces
        self._ends = [token_ends(tokenizer, row["text"]) for row in rows]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, sample = self.rows[index], super().__getitem__(index)
        own = self._pieces[row["speaker"]]
        reference = own[int(torch.randint(len(own), ()))]
        return sample | self._said(index, sample) | {"reference": torch.tensor(reference)}

    def _said(self, index: int, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of each position that predicts a frame, the first and last position of the text that is said in it."""
        row, ends, start = self.rows[index], self._ends[index], int(sample["start"])
        num_frames = len(row["audio_codes"])
        times = (np.arange(num_frames) + 0.5) * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
        character = np.interp(times, np.arange(len(row["said"])) * TICK_S, row["said"])
        low, high = (
            start - 1 + np.searchsorted(ends, character + lead, side="right").clip(max=len(ends) - 1)
            for lead in (-NEARBY, NEARBY)
        )
        predicting = np.arange(start - 1, start - 1 + num_frames)
        found = {}
        for name, places in (("said_from", low), ("said_to", high)):
            whole = torch.full((int(sample["length"]),), -1)
            # Streamed text that has not come yet can't be looked at.
            whole[predicting] = torch.from_numpy(np.minimum(places, predicting))
            found[name] = whole
        return found


def table_of(pools: dict[str, Tensor]) -> tuple[Tensor, dict[str, range]]:
    """(all speakers' pieces in one table, where in it each speaker's are)"""
    ends = np.cumsum([len(pool) for pool in pools.values()]).tolist()
    places = {name: range(end - len(pool), end) for (name, pool), end in zip(pools.items(), ends, strict=True)}
    return torch.cat(list(pools.values())), places


def fewer_kernels() -> None:
    """The same norms and rotations in fewer operations, each of which a GPU has to be asked for.

    Qwen3-TTS's three kinds of position are the same where there is no picture, so one of them is enough.
    """
    from qwen_tts.core.models import modeling_qwen3_tts as modeling

    def normed(self: Any, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.to(self.weight.dtype), self.weight.shape, self.weight, self.variance_epsilon)

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_sections: Any) -> tuple[Tensor, Tensor]:
        cos, sin = cos[0, :, None], sin[0, :, None]
        turned = (vectors * cos + modeling.rotate_half(vectors) * sin for vectors in (query, key))
        return next(turned), next(turned)

    modeling.Qwen3TTSRMSNorm.forward = normed
    modeling.apply_multimodal_rotary_pos_emb = rotated


def token_ends(tokenizer: Any, text: str) -> np.ndarray:
    """Where in the text each of its tokens ends."""
    ends = tokenizer(text, return_offsets_mapping=True).offset_mapping
    return np.array([end for _, end in ends])


def collate_guided(samples: Sequence[dict[str, Tensor]]) -> Batch:
    batch = collate([{name: value for name, value in sample.items() if name not in GUIDES} for sample in samples])
    length = batch["labels"].shape[1]
    for name in GUIDES:
        filled = [F.pad(sample[name], (0, length - len(sample[name])), value=-1) for sample in samples]
        batch[name] = torch.stack(filled)
    return batch
