"""Utterances with their codes: read, checked against the model, divided by text, and made into training samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from batches import bucket_length
from layout import Vocabulary, build_sample, prompt
from rows import Row, read_rows
from torch import Tensor
from torch.utils.data import Dataset

from keepstep.errors import DataError

FIRST_SPEAKER_ID = 952
"""Counted from the end of the codebook, 3000 of 3072: above the tags and the end of speech. Qwen's own custom voices
have places here, too; a base model has none of them."""


@dataclass(frozen=True)
class Limits:
    """What the model's tables can hold."""

    num_codebooks: int
    codebook_size: int


def load_utterances(path: str | Path, limits: Limits, speakers: Sequence[str] = ()) -> list[Row]:
    """Rows with codes that fit the model, of the speakers wanted (all, if none is named)."""
    rows = read_rows(path, needed=("audio", "text", "speaker", "audio_codes"))
    for number, row in enumerate(rows, 1):
        row["speaker"] = row["speaker"].lower()
        row["audio_codes"] = _checked_codes(row["audio_codes"], limits, f"{path}, row {number} ({row['audio']})")
    found = sorted({row["speaker"] for row in rows})
    wanted = {speaker.lower() for speaker in speakers} or set(found)
    if absent := wanted - set(found):
        raise ValueError(f"{path} has no rows of {', '.join(sorted(absent))}; its speakers are {', '.join(found)}")
    return [row for row in rows if row["speaker"] in wanted]


def _checked_codes(codes: Any, limits: Limits, where: str) -> np.ndarray:
    array = np.asarray(codes, dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != limits.num_codebooks or not len(array):
        raise ValueError(f"{where}: codes of shape {list(array.shape)}, expected [frames][{limits.num_codebooks}]")
    if array.min() < 0 or array.max() >= limits.codebook_size:
        raise ValueError(
            f"{where}: codes from {array.min()} to {array.max()}, but the model has 0 to {limits.codebook_size - 1}: "
            "they are another codec's; run prepare.py with this model"
        )
    return array


def split_by_text(rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
    """(train, validation): a text is in one of them only, whoever says it; which, the text alone decides."""
    texts = sorted({_normalised(row["text"]) for row in rows}, key=lambda text: xxhash.xxh3_64_intdigest(text.encode()))
    if len(texts) < 2 or not share:
        return rows, []
    held_out = set(texts[: max(1, round(share * len(texts)))])
    train = [row for row in rows if _normalised(row["text"]) not in held_out]
    return train, [row for row in rows if _normalised(row["text"]) in held_out]


def _normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def speaker_ids(speakers: Sequence[str], config: Any) -> dict[str, int]:
    """Each speaker's place among the codec embeddings; none of them in use."""
    talker = config.talker_config
    first = talker.code_predictor_config.vocab_size + FIRST_SPEAKER_ID
    room = talker.vocab_size - first
    if len(speakers) > room:
        raise ValueError(f"{len(speakers)} speakers, but the model has room for {room} voices of its own")
    return {speaker: first + number for number, speaker in enumerate(sorted(speakers))}


class SameUtterances:
    """Tracked with a run, so that it does not go on with other utterances than it has begun with.

    Where it stands among its batches would then mean nothing, and a text that is held out now was learnt before.
    """

    def __init__(self, rows: Sequence[Row], batch_frames: int) -> None:
        digest = xxhash.xxh3_128(str(batch_frames).encode())
        for row in rows:
            digest.update(repr((row["speaker"], row["text"])).encode())
            digest.update(np.ascontiguousarray(row["audio_codes"]))
        self._fingerprint = digest.hexdigest()
        self._said = f"{len(rows)} utterances, --batch-frames {batch_frames}"

    def state_dict(self) -> dict[str, str]:
        return {"fingerprint": self._fingerprint, "said": self._said}

    def load_state_dict(self, state: dict[str, str]) -> None:
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"the run was begun with other utterances or batches ({state['said']}; now {self._said}): give it "
                "those again, or begin anew with another --name"
            )


class Utterances(Dataset[dict[str, Tensor]]):
    """Training samples, put together when asked for; `num_frames` says how many predictions each is."""

    def __init__(
        self,
        rows: list[Row],
        tokenizer: Any,
        vocabulary: Vocabulary,
        speakers: dict[str, int],
        language: str = "auto",
        streaming: bool = False,
    ) -> None:
        self.rows = rows
        self._vocabulary, self._speakers, self._language, self._streaming = vocabulary, speakers, language, streaming
        self._prompts = [tokenizer(prompt(row["text"])).input_ids for row in rows]
        self.num_frames = [len(row["audio_codes"]) + 1 for row in rows]  # and the end of speech

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        sample = build_sample(
            self._prompts[index],
            row["audio_codes"],
            self._speakers[row["speaker"]],
            self._vocabulary,
            self._language,
            self._streaming,
        )
        return sample | {"scale": torch.tensor(1 / bucket_length(self.num_frames[index]))}
