"""Makes real small checkpoints, and lets somebody change them and put every checksum right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint.saver import Saver
from keepstep.checkpoint.store import MANIFEST, Manifest, Store, _checksum, record
from keepstep.checkpoint.tree import Tensors, put_together, tensor_keys
from keepstep.seeding import capture_rng

STEP = 3


def make_state() -> dict[str, Any]:
    """Something of every kind that a checkpoint can hold."""
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([0.5, 1.5]), "n": torch.tensor(7)},
        "optimizer": {"state": {"model": {"weight": {"exp_avg": torch.ones(2, 3)}}}, "groups": [{"lr": 0.1}]},
        "schedulers": {"scheduler": {"last": 3, "factors": (0.5, float("inf")), "dtype": torch.bfloat16}},
        "loaders": {"loader": {"passes": 1, "offset": 2, "seen": {1, 2}}},
        "tracked": {"ema": {1: np.arange(3), "raw": b"\x00\xff"}},
        "scaler": None,
        "run": {"step": STEP, "metrics": {"loss": 0.25}},
    }


def make_checkpoint(root: Path) -> Store:
    store = Store(root / "checkpoints", keep=9)
    saver = Saver(store, 0, None, "nonce", False, lambda manifest, seconds: None)
    manifest = Manifest(STEP, 1, 1, "single", metrics={"loss": 0.25})
    saver.save(manifest, make_state(), {"rng": capture_rng(), "epoch_rng": None}, wait=True)
    return store


def forge(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file of a checkpoint, in place or to what is returned, and makes the manifest fit."""
    content = json.loads((folder / name).read_text())
    changed = change(content)
    (folder / name).write_text(json.dumps(content if changed is None else changed))
    seal(folder)


def seal(folder: Path) -> None:
    """Makes sizes and checksums what they should be, as an attacker would."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name in list(manifest["files"]):
            path = folder / name
            if path.is_file() and not path.is_symlink():
                found = record(path)
                manifest["files"][name] = {"bytes": found.bytes, "xxh3": found.xxh3}
        manifest.pop("xxh3", None)
        (folder / MANIFEST).write_text(json.dumps({**manifest, "xxh3": _checksum(manifest)}))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        pass  # there is nothing left to put right


def read_everything(store: Store) -> tuple[dict[str, Any], Any, Tensors]:
    """As a resume does it, without the objects that would take the state."""
    from keepstep.checkpoint.contents import check_contents, read_contents

    store.check(STEP)
    check_contents(store, STEP)
    contents = read_contents(store, STEP)
    own = contents.reader.rank_state(0)
    targets: Tensors = {}
    for key in [*tensor_keys(contents.skeleton), *tensor_keys(own)]:
        shape, dtype = contents.reader.shape_and_dtype(key)
        targets[key] = torch.empty(shape, dtype=dtype)
    contents.reader.load(targets)
    return put_together(contents.skeleton, targets), put_together(own, targets), targets
