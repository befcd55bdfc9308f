"""The certificate: the verdict in words, its JSON, and a page that nothing in it can break."""

from __future__ import annotations

import json
from pathlib import Path

from keepstep.job import Target
from keepstep.verify.cause import Cause
from keepstep.verify.certificate import Certificate
from keepstep.verify.compare import Comparison, Difference
from keepstep.verify.inject import Injected
from keepstep.verify.plan import Fault
from keepstep.verify.resized import Resized

SETTINGS = {"strategy": "ddp", "workers": 2, "engine": "torchrun", "device": "cpu", "precision": "fp32"}
EQUAL = Comparison(8, 2, {"weights": 40, "metrics": 8}, {})


def certificate(folder: Path, comparison: Comparison = EQUAL) -> Certificate:
    script = folder / "train.py"
    script.write_text("pass")
    made = Certificate(Target(str(script), ("--name", "<b>")), 7, SETTINGS, steps=8, every=2)
    made.injected = [Injected(Fault("rank", 3, (1,), 0.5), "run", 5, 1.0, "step", 4, 2.5)]
    made.comparisons = {"faults": comparison}
    return made


def test_equal_runs_are_certified(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    assert made.is_certified and made.verdict.startswith("certified: through 1 fault,")
    written = [path.name for path in made.write(tmp_path / "out")]
    assert written == ["certificate.json", "certificate.html"]
    content = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert content["certified"] and content["faults"][0]["steps_lost"] == 1
    page = (tmp_path / "out" / "certificate.html").read_text()
    assert "&lt;b&gt;" in page and "<b>train" not in page and str(tmp_path) not in page + json.dumps(content)
    assert not any(word in page for word in ("http", "src=", "<script", "@import", "url("))


def test_a_difference_is_named_first(tmp_path: Path) -> None:
    first = Difference("weights", "model/<w>", 6, 1, 1, 3)
    made = certificate(tmp_path, Comparison(8, 2, {"weights": 40}, {"weights": first}))
    made.cause = Cause("untracked-state", "'x' was lost", "Track it", ("train.py:3",))
    assert not made.is_certified
    assert made.verdict.endswith("first in weights 'model/<w>' on rank 1 at step 6 (and 3 more in that step)")
    made.write(tmp_path)
    page = (tmp_path / "certificate.html").read_text()
    assert "Not certified" in page and "model/&lt;w&gt;" in page and "train.py:3" in page and "Track it" in page


def test_a_problem_nothing_compared_and_other_samples_are_not_certified(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    made.problems = ["the run is over too soon"]
    assert not made.is_certified and "too soon" in made.verdict
    made = certificate(tmp_path)
    made.comparisons = {}
    assert not made.is_certified
    made = certificate(tmp_path)
    made.resized = Resized(2, 1, 4, 4, False, 5, "numbers", 0.0, "", "")
    assert not made.is_certified and "step 5 saw other samples" in made.verdict
    made.resized = Resized(2, 1, 4, 4, True, None, "numbers", 0.5, "loss", "")
    assert not made.is_certified and "'loss' differs by 5.0e-01" in made.verdict
    made.resized = Resized(2, 1, 4, 4, True, None, "numbers", 0.5, "loss", "dropout")
    assert made.is_certified
    made.write(tmp_path)
    assert "by nature: dropout" in (tmp_path / "certificate.html").read_text()
