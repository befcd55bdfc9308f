"""What is trained: Qwen3-TTS's talker and sub-talker, with the loss that generation calls for."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from layout import NO_LABEL, Batch
from torch import Tensor, nn

SUB_TALKER_WEIGHT = 0.3
LORA_SCALING = 2
"""What low-rank additions count for: alpha over rank."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Losses(NamedTuple):
    """Sums over each utterance's frames, so that means can be taken over whatever they are wanted for."""

    talker: Tensor
    """Cross-entropy of the first codebook's codes and of the end of speech."""
    sub_talker: Tensor
    """That of the other codebooks, their mean."""
    frames: Tensor
    """Positions with a label: the frames and the end."""
    right: Tensor
    """Of these, those whose most likely code is the right one."""

    @property
    def total(self) -> Tensor:
        return self.talker + SUB_TALKER_WEIGHT * self.sub_talker


class VoiceModel(nn.Module):
    """The talker of a base model; its weights have the names that they have in the whole model."""

    def __init__(self, talker: nn.Module) -> None:
        super().__init__()
        self.talker = talker

    def forward(self, batch: Batch) -> Losses:
        if not len(batch["length"]):
            # A worker without a share of the last held-out texts: where layers are gathered, all must run them.
            return Losses(*(part[:0] for part in self(_one_frame_like(batch))))
        hidden = self.hidden_states(batch)
        labels = batch["labels"]
        logits = self.talker.codec_head(hidden)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
        )
        labelled = labels != NO_LABEL
        talker = losses.view_as(labels).sum(1)
        right = ((logits.argmax(-1) == labels) & labelled).sum(1)
        return Losses(talker, self._sub_talker_losses(hidden, batch), labelled.sum(1), right)

    def hidden_states(self, batch: Batch) -> Tensor:
        """The talker's hidden states over text and frames as they are, each frame known once it is past."""
        return self.talker.model(inputs_embeds=self._embeddings(batch), use_cache=False).last_hidden_state

    def sub_talker_logits(self, hidden: Tensor, frames: Tensor) -> Tensor:
        """[frames][codebooks - 1][codes]: what the sub-talker says of each code, given those before it."""
        predictor = self.talker.code_predictor
        embeddings = predictor.get_input_embeddings()
        first = self.talker.get_input_embeddings()(frames[:, 0])
        others = [embeddings[i](frames[:, i + 1]) for i in range(frames.shape[1] - 2)]
        inputs = torch.stack([hidden, first, *others], dim=1)
        return predictor.forward_finetune(inputs_embeds=inputs, use_cache=False).logits

    def codec_embeddings(self, batch: Batch) -> Tensor:
        """The codec channel's, speaker included: each speaker's is a row of the table, trained with the others."""
        return self.talker.get_input_embeddings()(batch["codec_ids"])

    def _embeddings(self, batch: Batch) -> Tensor:
        talker = self.talker
        text = talker.text_projection(talker.get_text_embeddings()(batch["text_ids"]))
        position = torch.arange(text.shape[1], device=text.device)
        has_codec = (position >= batch["role"][:, None])[..., None]
        is_frame = (position >= batch["start"][:, None])[..., None]
        codec = self.codec_embeddings(batch)
        others = torch.zeros_like(codec)
        for i, embedding in enumerate(talker.code_predictor.get_input_embeddings(), 1):
            others = others + embedding(batch["codes"][..., i])
        return text + codec * has_codec + others * is_frame

    def frames_learnt(self, batch: Batch) -> Tensor:
        """Which positions are frames whose codes the sub-talker is asked for: all of them."""
        position = torch.arange(batch["labels"].shape[1], device=batch["labels"].device)
        return (position >= batch["start"][:, None]) & (position < batch["length"][:, None])

    def _sub_talker_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Each frame from the hidden state before it, which is all that generation has when it makes the frame."""
        learnt = self.frames_learnt(batch)
        frames = batch["codes"][learnt]
        logits = self.sub_talker_logits(hidden[:, :-1][learnt[:, 1:]], frames)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), frames[:, 1:].flatten(), reduction="none")
        by_frame = losses.view(len(frames), -1).mean(1)
        utterance = torch.arange(len(learnt), device=hidden.device)[:, None].expand_as(learnt)[learnt]
        return torch.zeros(len(learnt), device=hidden.device).index_add(0, utterance, by_frame)


def _one_frame_like(batch: Batch) -> Batch:
    length = batch["text_ids"].shape[1]
    made = {name: value.new_zeros(1, *value.shape[1:]) for name, value in batch.items()}
    return made | {"length": batch["length"].new_tensor([length]), "start": batch["start"].new_tensor([length - 1])}


def set_speaker(talker: nn.Module, speaker_id: int, embedding: Tensor) -> None:
    """Gives a voice its place among the codec embeddings: there generation looks it up, and there it is trained."""
    with torch.no_grad():
        table = talker.get_input_embeddings().weight
        table[speaker_id] = embedding.to(table)


def add_lora(model: VoiceModel, rank: int) -> None:
    """Trains low-rank additions to every projection instead of the weights themselves."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=LORA_SCALING * rank, target_modules=list(LORA_TARGETS), lora_dropout=0.0)
    inject_adapter_in_model(config, model)


def merge_lora(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with low-rank additions as the state of a plain model: the additions are added."""
    merged = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        if ".base_layer." in name:
            stem = name.split(".base_layer.")[0]
            a, b = (state[f"{stem}.lora_{letter}.default.weight"].float() for letter in "AB")
            value = (value.float() + LORA_SCALING * (b @ a)).to(value.dtype)
            name = name.replace(".base_layer.", ".")
        merged[name] = value
    return merged
