"""What the supervisor asks of workers that hang, done to those on this machine."""

from __future__ import annotations

from pathlib import Path

from keepstep.observe.hang import Request
from keepstep.observe.heart import Pulse
from keepstep.observe.stacks import ask_for_stacks, kill


def obey(request: Request | None, hearts: Path) -> None:
    if request is None:
        return
    for path in hearts.glob("rank_*"):
        (ask_for_stacks if request is Request.LOOK else kill)(Pulse(path))
