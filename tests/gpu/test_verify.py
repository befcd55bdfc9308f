"""`keepstep verify` on CUDA: what is sound is certified there too, and what is not is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.test_verify import verify

pytestmark = pytest.mark.gpu
CUDA = ("--device", "cuda", "--deterministic", "--workers", "1", "--kills", "1")


def test_a_sound_script_is_certified(tmp_path: Path) -> None:
    code, certificate, printed = verify(tmp_path, "sound/augmented", *CUDA)
    assert code == 0, printed
    assert certificate["certified"] and certificate["problems"] == []


def test_state_that_is_not_tracked_is_caught(tmp_path: Path) -> None:
    code, certificate, printed = verify(tmp_path, "defects/untracked", *CUDA)
    assert code == 1, printed
    assert not certificate["certified"] and certificate["cause"]["kind"] == "untracked-state"
