"""Lesson 05: what a kill does to the samples that a training has seen, with raw Ray Train and with keepstep."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from workshop.conftest import pictures, text
from workshop.notebook_tables import outputs, table

WORKSHOP = Path(__file__).parents[2] / "workshop"
sys.path.insert(0, str(WORKSHOP))

from common import consumed, faults  # noqa: E402  # the lessons' folder is no package
from common.checks import judge  # noqa: E402

LESSON = "05-fault-tolerance"
# Eight steps, a checkpoint every second one, and with this seed a kill after the fifth.
SMALL = ("--epochs", 1, "--limit", 256, "--batch-size", 32, "--checkpoint-every", 2, "--seed", 6)


def written(folder: Path, name: str, from_step: int, steps: list[tuple[int, int, list[int]]]) -> None:
    lines: list[dict[str, Any]] = [{"rank": int(name[-1]), "pid": 1, "from_step": from_step, "time": float(name[0])}]
    lines += [{"step": s, "epoch": e, "time": 0.0, "loss": float(s), "ids": ids} for s, e, ids in steps]
    (folder / "consumed").mkdir(exist_ok=True)
    path = folder / "consumed" / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_that_were_not_saved_are_not_in_the_weights(tmp_path: Path) -> None:
    written(tmp_path, "1_rank_0", 0, [(1, 0, [0]), (2, 0, [2]), (3, 0, [4])])
    written(tmp_path, "1_rank_1", 0, [(1, 0, [1]), (2, 0, [3])])
    written(tmp_path, "2_rank_0", 2, [(3, 0, [4, 5])])  # one worker goes on from step 2
    made = consumed.history(consumed.attempts(tmp_path))
    assert [step.ids for step in made] == [[0], [1], [2], [3], [4, 5]]
    assert consumed.tally(tmp_path, 6, 1) == consumed.Tally(once=6, repeated=0, lost=0, redone=1)


def test_an_epoch_begun_again_repeats_and_one_left_out_loses(tmp_path: Path) -> None:
    written(tmp_path, "1_rank_0", 0, [(1, 0, [0]), (2, 0, [1])])
    written(tmp_path, "2_rank_0", 1, [(2, 0, [0]), (3, 0, [1]), (4, 1, [0])])
    tally = consumed.tally(tmp_path, 2, 2)
    assert (tally.once, tally.repeated, tally.lost, tally.redone) == (2, 1, 1, 1)
    assert not tally.exactly_once


def test_a_resume_that_made_nothing_new_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    written(tmp_path, "1_rank_0", 0, [(1, 0, [0]), (2, 0, [1])])
    written(tmp_path, "2_rank_0", 1, [])
    written(tmp_path, "3_rank_0", 1, [(2, 0, [2])])
    assert [step.ids for step in consumed.history(consumed.attempts(tmp_path))] == [[0], [2]]


def test_a_line_that_was_cut_by_a_kill_does_not_count(tmp_path: Path) -> None:
    written(tmp_path, "1_rank_0", 0, [(1, 0, [0])])
    with (tmp_path / "consumed" / "1_rank_0.jsonl").open("a") as file:
        file.write('{"step": 2, "epo')
    assert len(consumed.attempts(tmp_path)[0].steps) == 1


def test_losses_are_means_over_all_workers_samples(tmp_path: Path) -> None:
    written(tmp_path, "1_rank_0", 0, [])
    steps = [consumed.Step(1, 0, 0.0, 2.0, [1, 2, 3]), consumed.Step(1, 0, 0.0, 6.0, [4])]
    assert consumed.losses(steps) == {1: 3.0}


def test_kills_are_drawn_by_the_seed() -> None:
    assert faults.draw(3, 50, 4, seed=1) == faults.draw(3, 50, 4, seed=1) != faults.draw(3, 50, 4, seed=2)
    with pytest.raises(ValueError, match="9 kills need 11 steps"):
        faults.draw(9, 10, 2, seed=0)


@pytest.mark.ray
def test_raw_ray_repeats_samples_and_keepstep_does_not(run_lesson: Any, ray_address: str, tmp_path: Path) -> None:
    words = ("--order", "torch", *SMALL, "--output", tmp_path)
    kept = run_lesson(LESSON, "kill_and_count.py", "keepstep", *words)
    assert kept.returncode == 0, kept.stdout + kept.stderr
    assert "256 once, 0 repeated, 0 lost" in kept.stdout
    assert "losses bitwise those of the undisturbed run: yes" in kept.stdout
    assert "weights bitwise those of the undisturbed run: yes" in kept.stdout

    words = (*SMALL, "--no-reference", "--output", tmp_path)
    raw = run_lesson(LESSON, "kill_and_count.py", "raw", *words, RAY_ADDRESS=ray_address)
    assert raw.returncode == 0, raw.stdout + raw.stderr
    verdict = json.loads((tmp_path / "raw-again-every-2-killed" / "verdict.json").read_text())
    assert len(verdict["kills"]) == 1
    assert verdict["kills"][0]["recovery_s"] > 0
    assert verdict["tally"]["repeated"] > 0
    assert verdict["tally"]["lost"] == 0

    # Until the kill both versions are the same training.
    attempts = consumed.attempts(tmp_path / "raw-again-every-2-killed")
    raw_losses = consumed.losses([step for step in attempts[0].steps if step.step <= attempts[1].from_step])
    kept_losses = consumed.losses(
        consumed.history(consumed.attempts(tmp_path / "keepstep-torchrun-every-2-undisturbed"))
    )
    assert len(raw_losses) >= 2
    for step, loss in raw_losses.items():
        assert loss == pytest.approx(kept_losses[step], rel=1e-6)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("resume", "every", "repeats", "loses"),
    [("next", 2, False, True), ("skip", 2, False, False), ("again", 0, False, False)],
)
def test_what_raw_ray_does_by_how_it_resumes(
    resume: str, every: int, repeats: bool, loses: bool, run_lesson: Any, ray_address: str, tmp_path: Path
) -> None:
    words = (*SMALL, "--checkpoint-every", every, "--resume", resume, "--output", tmp_path)
    done = run_lesson(LESSON, "kill_and_count.py", "raw", *words, RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads((tmp_path / f"raw-{resume}-every-{every}-killed" / "verdict.json").read_text())
    assert bool(verdict["tally"]["repeated"]) is repeats
    assert bool(verdict["tally"]["lost"]) is loses
    assert verdict["same_losses"] is not loses
    assert bool(verdict["weights_apart"]) is loses


def test_bad_input_says_what_to_do(run_lesson: Any, tmp_path: Path) -> None:
    for words, said in {
        ("keepstep", "--checkpoint-every", "0"): "give --checkpoint-every 1 or more",
        ("raw", "--kills", "-1"): "0 or more are needed",
        ("keepstep", "--kills", "9", "--limit", "64", "--epochs", "1"): "9 kills need 11 steps",
        ("raw", "--use-gpu", "True"): "" if torch.cuda.is_available() else "torch sees no GPU",
    }.items():
        if said:
            done = run_lesson(LESSON, "kill_and_count.py", *words, "--output", tmp_path)
            assert done.returncode != 0
            assert said in done.stderr
    done = run_lesson(LESSON, "train_ray_fault_tolerant.py", "--batch-size", 31, "--num-workers", 2)
    assert "--batch-size 31 does not divide by 2 workers" in done.stderr


def answer(number: int, source: str, tmp_path: Path) -> str:
    """The hint that an answer gets: the solution with `source` after it."""
    exercises = WORKSHOP / LESSON / "exercises"
    (solution,) = (exercises / "solutions").glob(f"{number}_*.py")
    (tmp_path / solution.name).write_text(f"{solution.read_text()}\n\n{source}")
    (judged,) = judge(exercises, tmp_path)
    assert not judged.right
    return judged.hint


def test_wrong_answers_get_a_hint(tmp_path: Path) -> None:
    head = "def in_the_weights(attempts):\n"
    only_last = head + "    return [i for _, ids in attempts[-1].steps for i in ids]\n"
    assert "count once" in answer(1, only_last, tmp_path)
    without_repeats = head + "    return list(dict.fromkeys(i for a in attempts for _, ids in a.steps for i in ids))\n"
    assert "really repeated" in answer(1, without_repeats, tmp_path)
    by_step = "    made = {step: ids for attempt in attempts for step, ids in attempt.steps}\n"
    by_step += "    return [i for step in sorted(made) for i in made[step]]\n"
    assert "older step 4" in answer(1, head + by_step, tmp_path)


def test_wrong_places_in_the_data_get_a_hint(tmp_path: Path) -> None:
    head = "def remaining(num_samples, batch_size, batches_done, rank, num_workers, seed, epoch):\n"
    again = "    return order(num_samples, seed, epoch)[rank::num_workers]\n"
    assert "trained again" in answer(2, head + again, tmp_path)
    everybody = "    return order(num_samples, seed, epoch)[batches_done * batch_size:]\n"
    assert "two of them train the same" in answer(2, head + everybody, tmp_path)
    other_epoch = "    return order(num_samples, seed, 0)[batches_done * batch_size:][rank::num_workers]\n"
    assert answer(2, head + other_epoch, tmp_path)


def test_wrong_states_get_a_hint(tmp_path: Path) -> None:
    alias = 'Average.state_dict = lambda self: {"value": self.value, "updates": self.updates}\n'
    assert "return a copy" in answer(3, alias, tmp_path)
    forgotten = "def load(self, state):\n    self.value = state['value'].clone()\nAverage.load_state_dict = load\n"
    assert "the average is another one" in answer(3, forgotten, tmp_path)


@pytest.mark.parametrize("use_gpu", [True, False])
def test_only_on_a_gpu_kernels_are_asked_to_be_deterministic(use_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WORKSHOP / LESSON))
    lesson = importlib.import_module("kill_and_count")
    args = lesson.parse(["keepstep", "--use-gpu", "False"])
    args.use_gpu = use_gpu
    words = lesson.command(args, "mine")
    assert ("--deterministic" in words) == use_gpu
    assert words[words.index("--device") + 1] == ("cuda" if use_gpu else "cpu")


def test_the_notebook_is_stored_with_its_results() -> None:
    nbformat = pytest.importorskip("nbformat")
    check_notebook(nbformat.read(WORKSHOP / LESSON / "Fault_Tolerance.ipynb", as_version=4))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_notebook_runs(run_notebook: Any) -> None:
    env = {"WORKSHOP_EPOCHS": "2", "WORKSHOP_LIMIT": "1024"}  # an epoch after the kill
    check_notebook(run_notebook(LESSON, "Fault_Tolerance.ipynb", timeout=1200, **env))


def check_notebook(notebook: Any) -> None:
    """What it claims is what it shows: raw Ray Train repeats or loses, keepstep does neither."""
    assert len(pictures(notebook)) == 2
    assert all(len(picture) > 5000 for picture in pictures(notebook))
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    rows = table(notebook, "repeated")
    assert rows["raw, again"]["repeated"] > 0
    assert rows["raw, next"]["lost"] > 0
    for label in ("raw, skip", "raw, epoch ends", "keepstep", "keepstep on Ray"):
        assert not any(rows[label][name] for name in ("repeated", "lost", "weights differ by")), label
    assert re.search("(?<!not )certified", text(notebook))
