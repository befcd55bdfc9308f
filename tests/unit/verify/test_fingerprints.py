"""What a worker notes of its steps, of its variables and of the lines that ask the clock."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep.fingerprints.hashing import digest, samples_digest
from keepstep.fingerprints.user_code import is_user_file
from keepstep.fingerprints.variables import Variables
from keepstep.fragment import Fragment


def test_hashes_tell_values_types_and_shapes_apart() -> None:
    zero, negative = torch.zeros(2), -torch.zeros(2)
    values: list[Any] = [
        zero, negative, torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), torch.zeros(4, dtype=torch.bfloat16),
        np.zeros(2), [0.0, 0.0], (0.0, 0.0), {"a": 0.0}, {"b": 0.0}, 0.0, 0, False, None, "0", b"0", {1, 2},
        torch.zeros(0),
    ]  # fmt: skip
    hashes = [digest(value) for value in values]
    assert len(set(hashes)) == len(values)
    assert hashes == [digest(value) for value in values]
    assert digest(torch.arange(6).reshape(2, 3).t()) == digest(torch.arange(6).reshape(2, 3).t().contiguous())


def test_a_fragment_is_hashed_by_what_it_holds() -> None:
    one, other = (Fragment(torch.Size([4]), 1, torch.tensor([1.0, value])) for value in (2.0, 3.0))
    assert digest(one) != digest(other) == digest(Fragment(torch.Size([4]), 1, torch.tensor([1.0, 3.0])))


def test_samples_add_up_the_same_however_they_are_divided() -> None:
    batch = {"x": torch.randn(6, 3), "y": np.arange(6), "names": list("abcdef")}

    def part(begin: int, end: int) -> Any:
        return {name: value[begin:end] for name, value in batch.items()}

    whole, divided = samples_digest(batch, 6), [samples_digest(part(0, 4), 4), samples_digest(part(4, 6), 2)]
    assert whole == sum(filter(None, divided)) % (1 << 64)
    assert samples_digest(part(0, 4), 3) != samples_digest(part(0, 4), 4)
    assert samples_digest(torch.tensor(1.0), 1) is None
    assert samples_digest([torch.zeros(2), torch.zeros(3)], 2) is None


class Holder:
    def __init__(self) -> None:
        self.level, self.rng = 0, random.Random(3)


def test_variables_of_the_callers_frames_are_seen() -> None:
    saved = nn.Linear(2, 2)
    variables = Variables(lambda value: value is saved)

    def look(count: int, state: Holder, average: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        kept = saved  # noqa: F841
        found = variables.look()
        return {key.split("|", 1)[1]: value for key, value in found.items() if "|look|" in key or "|Holder|" in key}

    state, average, tensors = Holder(), nn.Linear(2, 2), {"a": torch.zeros(2)}
    before = look(1, state, average, tensors)
    assert "look|kept|" not in before
    assert before["Holder|self.rng|state"].startswith("g")
    state.level += 1
    state.rng.random()
    with torch.no_grad():
        average.weight.add_(1)
    tensors["a"].add_(1)
    after = look(1, state, average, tensors)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"Holder|self.level|state", "Holder|self.rng|state", "look|average|", "look|tensors|"}


def test_whose_file_it_is() -> None:
    assert is_user_file(__file__)
    assert not any(
        map(is_user_file, (torch.__file__, json.__file__, "<frozen runpy>", sys.modules["keepstep"].__file__ or ""))
    )


WATCHED = """
import random, secrets, time, uuid
from time import perf_counter
from pathlib import Path
import numpy as np
from keepstep.fingerprints.suspects import install
install(Path("notes"), 0)
import time as again
for _ in range(3):
    again.time()                      # 9
np.random.default_rng()               # 10
np.random.default_rng(3)
random.Random(), random.Random(3)     # 12
random.SystemRandom()                 # 13
uuid.uuid4()                          # 14
secrets.token_hex()                   # 15
random.seed(0), np.random.seed(0)
assert isinstance(random.Random(1), random.Random) and random.Random(1).random() == random.Random(1).random()
import pickle
assert pickle.loads(pickle.dumps(time.time)) is time.time
"""


def test_lines_that_ask_the_clock_or_the_system_are_noted_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WATCHED.lstrip())
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=100)
    lines = [json.loads(line) for line in (tmp_path / "notes" / "suspects_0.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"], line["what"], line["kind"]) for line in lines] == [
        ("script.py", 9, "time.time", "time"),
        ("script.py", 10, "numpy.random.default_rng", "entropy"),
        ("script.py", 12, "random.Random", "entropy"),
        ("script.py", 13, "random.SystemRandom", "entropy"),
        ("script.py", 14, "uuid.uuid4", "entropy"),
        ("script.py", 15, "secrets.token_hex", "entropy"),
    ]


@pytest.mark.parametrize("value", [{}, [], None])
def test_values_that_hold_nothing_have_hashes_too(value: Any) -> None:
    assert len(digest(value)) == 16
