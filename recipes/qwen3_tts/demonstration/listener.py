"""What is said in each frame, whoever says it: the first codebook, as Qwen3-TTS's codec has one for meaning alone.

With codes that say how it sounds, each voice says a word in codes of its own, and a talker has to learn every word
once a voice. These are learnt from texts: a code is what is needed to tell the sounds that are said around it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from quantizer import ResidualQuantizer
from torch import Tensor, nn

MELS_PER_FRAME = 7
"""12.3 frames a second, near the 12.5 of the real codec."""
HEARD_AROUND = 5
"""Frames before and after, 0.4 s each, that tell what is said in one."""
PARTS = 3
"""A frame is up to so many sounds."""
PAUSE = "_"
STRESS = "\u02c8\u02cc"
LATENT = 64
NOTHING_NEW = 0.05
"""The likelihood of no sound. It is fixed: else a frame of each sound would name it, and all others nothing."""
WARP = 0.12
"""Voices are made to differ in the size of their mouths by this much more than they do."""


class FrameBlock(nn.Module):
    """Adds to each frame what it and its two neighbours say, or, without `neighbours`, what it says alone."""

    def __init__(self, width: int, neighbours: bool = True) -> None:
        super().__init__()
        self.neighbours = neighbours
        # Each frame is normalised by itself: what is said later must not change the codes of what was said before.
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear((3 if neighbours else 1) * width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.neighbours:
            padded = F.pad(normed, (0, 0, 1, 1))
            normed = torch.cat([padded[:, :-2], normed, padded[:, 2:]], 2)
        return x + self.outer(F.gelu(self.inner(normed)))


class Listener(nn.Module):
    """From a frame's mels and those around it to a code, and from a code to the sounds that it stands for."""

    def __init__(self, patch: int, width: int, num_codes: int, num_sounds: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(patch, width),
            *(FrameBlock(width) for _ in range(HEARD_AROUND)),
            nn.LayerNorm(width),
            nn.Linear(width, LATENT),
            nn.LayerNorm(LATENT, elementwise_affine=False),
        )
        self.quantizer = ResidualQuantizer(1, num_codes, LATENT)
        self.sounds = nn.Sequential(nn.Linear(LATENT, width), nn.GELU(), nn.Linear(width, PARTS * num_sounds))

    def codes(self, patches: Tensor) -> Tensor:
        """[batch, frames, patch] to [batch, frames]."""
        heard = self.encoder(patches)
        return self.quantizer.encode(heard.float().flatten(0, 1))[:, 0].view(heard.shape[:2])

    def likelihoods(self, heard: Tensor) -> Tensor:
        """[batch, frames, latent] to the logarithms [batch, frames * PARTS, no sound and every sound]."""
        sounds = self.sounds(heard).float().unflatten(2, (PARTS, -1)).flatten(1, 2).log_softmax(2)
        return F.pad(sounds + torch.tensor(1 - NOTHING_NEW).log(), (1, 0), value=float(torch.tensor(NOTHING_NEW).log()))


def sounds_of(texts: Iterable[str]) -> list[list[str]]:
    """The sounds of each text, by espeak-ng's dictionary, with a pause around each of its clauses."""

    def one(text: str) -> list[str]:
        command = ["espeak-ng", "-q", "--ipa", "--sep=_", "-v", "en-us", "--", text]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        clauses = [[sound for sound in re.split(rf"[_\s{STRESS}]+", line) if sound] for line in said.splitlines()]
        return [PAUSE, *(sound for clause in clauses if clause for sound in (*clause, PAUSE))]

    if not shutil.which("espeak-ng"):
        raise ValueError("espeak-ng is not installed: apt-get install espeak-ng")
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, texts))


def train_listener(
    listener: Listener,
    mels: Sequence[Tensor],
    said: Sequence[Sequence[int]],
    side_by_side: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
    patches: Callable[[Tensor], Tensor],
    num_steps: int,
    batch_frames: int,
    seed: int = 0,
) -> None:
    """From whole utterances [80, mels] and the numbers of their sounds, 1 and up; quantized in the second half.

    `side_by_side` makes of some spectrograms (one batch, how many frames each has), `patches` of a batch its frames.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(listener.parameters()).device
    by_length = torch.tensor([mel.shape[1] for mel in mels]).argsort()
    optimizer = torch.optim.AdamW(listener.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, num_steps, cycle_momentum=False)
    for step in range(num_steps):
        last = int(torch.randint(len(mels), (), generator=generator))
        longest = -(-mels[by_length[last]].shape[1] // MELS_PER_FRAME)
        chosen = by_length[max(0, last + 1 - max(1, batch_frames // longest)) : last + 1].tolist()
        batch, lengths = side_by_side([cut_off(mels[i], generator) for i in chosen])
        with torch.autocast(device.type, torch.bfloat16):
            heard = listener.encoder(patches(warped(batch, generator))).float()
        if step == num_steps // 2:
            listener.quantizer.start(heard.flatten(0, 1))
        if step >= num_steps // 2:
            quantized = listener.quantizer.decode(listener.quantizer.learn(heard.detach().flatten(0, 1))).view_as(heard)
            commitment = F.mse_loss(heard, quantized)
            heard = heard + (quantized - heard).detach()
        else:
            commitment = heard.new_zeros(())
        with torch.autocast(device.type, torch.bfloat16):
            likelihoods = listener.likelihoods(heard)
        loss = F.ctc_loss(
            likelihoods.transpose(0, 1),
            torch.tensor([sound for i in chosen for sound in said[i]], device=device),
            PARTS * lengths,
            torch.tensor([len(said[i]) for i in chosen]),
            reduction="sum",
        ) / int(lengths.sum())
        (loss + 0.25 * commitment).backward()
        torch.nn.utils.clip_grad_norm_(listener.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == num_steps - 1:
            print(f"listener step {step}: {loss.item():.3f} nats a frame", flush=True)


def cut_off(mel: Tensor, generator: torch.Generator) -> Tensor:
    """Its frames begin somewhere else."""
    return mel[:, int(torch.randint(MELS_PER_FRAME, (), generator=generator)) :]


def warped(mels: Tensor, generator: torch.Generator) -> Tensor:
    """[batch, bands, mels], each as if said by a smaller or larger mouth."""
    size, bands, length = mels.shape
    factors = 1 + WARP * (2 * torch.rand(size, 1, generator=generator) - 1)
    places = (torch.arange(bands) * factors).clamp(max=bands - 1)
    low = places.long().clamp(max=bands - 2)
    share = (places - low)[..., None].to(mels.device)
    low = low.to(mels.device)[..., None].expand(-1, -1, length)
    return mels.gather(1, low) * (1 - share) + mels.gather(1, low + 1) * share
