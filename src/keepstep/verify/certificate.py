"""What `keepstep verify` hands out: everything that was done and found, as JSON and as a page."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import keepstep
from keepstep.fingerprints.user_code import short_name
from keepstep.job import Target
from keepstep.standard_json import to_json
from keepstep.verify.cause import Cause
from keepstep.verify.compare import Comparison
from keepstep.verify.inject import Injected
from keepstep.verify.page import page
from keepstep.verify.plan import WORDS
from keepstep.verify.resized import TOLERANCE, Resized

CERTIFICATE, PAGE = "certificate.json", "certificate.html"
FORMAT = 1


@dataclass
class Certificate:
    """The parts of one, as they are found."""

    target: Target
    seed: int
    """Of the faults."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the reference, as its worker resolved them."""
    steps: int = 0
    every: int = 0
    seconds: float = 0.0
    injected: list[Injected] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    resized: Resized | None = None
    resize_skipped: str = ""
    cause: Cause | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why there is no certificate, apart from differences."""

    @property
    def is_certified(self) -> bool:
        same = all(not comparison.differences for comparison in self.comparisons.values())
        resized = self.resized is None or self.resized.is_good
        return bool(self.comparisons) and same and resized and not self.problems

    @property
    def verdict(self) -> str:
        """In one sentence."""
        if self.is_certified:
            faults = f"{len(self.injected)} fault{'s' if len(self.injected) != 1 else ''}"
            return f"certified: through {faults}, every one of its {self.steps} steps came out bitwise the same"
        for name, comparison in self.comparisons.items():
            if comparison.first is not None:
                return f"not certified: run {name} differs from the reference, first in {comparison.first.words}"
        if self.resized is not None and not self.resized.same_samples:
            return (
                f"not certified: with {self.resized.workers} workers, step {self.resized.first_other_sample} saw other "
                "samples"
            )
        if self.resized is not None and not self.resized.is_good:
            return (
                f"not certified: with {self.resized.workers} workers '{self.resized.metric}' differs by "
                f"{self.resized.largest:.1e}, which is more than rounding"
            )
        return f"not certified: {self.problems[0] if self.problems else 'nothing was compared'}"

    def as_json(self) -> dict[str, Any]:
        chosen = ("strategy", "workers", "engine", "device", "precision", "deterministic", "seed")
        return {
            "format": FORMAT,
            "certified": self.is_certified,
            "verdict": self.verdict,
            "script": _shown_script(self.target),
            "arguments": list(self.target.arguments),
            "script_sha256": _hash_of(self.target),
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "keepstep": keepstep.__version__,
            },
            "settings": {name: self.settings.get(name) for name in chosen},
            "steps": self.steps,
            "checkpoint_every": self.every,
            "seed_of_faults": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": [_fault(injected) for injected in self.injected],
            "comparisons": [_comparison(name, found) for name, found in self.comparisons.items()],
            "changed_workers": self._resized_json(),
            "cause": asdict(self.cause) if self.cause is not None else None,
            "notes": self.notes,
            "problems": self.problems,
        }

    def _resized_json(self) -> dict[str, Any]:
        if self.resized is None:
            return {"done": False, "why": self.resize_skipped}
        return {"done": True, "good": self.resized.is_good, "tolerance": TOLERANCE, **asdict(self.resized)}

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        content = json.loads(to_json(self.as_json()))
        (folder / CERTIFICATE).write_text(json.dumps(content, indent=1) + "\n")
        (folder / PAGE).write_text(page(content))
        return [folder / CERTIFICATE, folder / PAGE]


def _fault(injected: Injected) -> dict[str, Any]:
    return {
        "run": injected.run,
        "kind": injected.fault.kind,
        "what": WORDS[injected.fault.kind],
        "ranks": list(injected.fault.ranks),
        "planned_step": injected.fault.step,
        "step": injected.at_step,
        "phase": injected.phase,
        "resumed_from": injected.resumed_from,
        "steps_lost": injected.steps_lost,
        "recovered_s": injected.recovered_s,
    }


def _comparison(name: str, found: Comparison) -> dict[str, Any]:
    return {
        "run": name,
        "equal": not found.differences,
        "steps": found.steps,
        "replayed": found.replayed,
        "values": found.counts,
        "first": asdict(found.first) if found.first is not None else None,
        "differences": {kind: asdict(difference) for kind, difference in found.differences.items()},
    }


def _shown_script(target: Target) -> str:
    return short_name(target.what) if target.is_script else target.what


def _hash_of(target: Target) -> str | None:
    return hashlib.sha256(Path(target.what).read_bytes()).hexdigest() if target.is_script else None
