"""`keepstep demo`: trains a small GPT twice, kills a worker in one of the runs, and compares them bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from keepstep.engines import Outcome
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.observe.heart import Pulse
from keepstep.recipes import recipe_folder
from keepstep.show import total_ledger
from keepstep.supervisor import supervise

_STEPS, _EVERY, _KILL_AT = 120, 25, 65
_SCRIPT_ARGUMENTS = ("--steps", str(_STEPS), "--epochs", "2", "--layers", "2", "--hidden", "96", "--batch-size", "16")


def demo(storage: Path) -> int:
    """Prints what happens; returns 0 if the killed run's losses are bitwise those of the other."""
    for name in ("demo-calm", "demo-killed"):
        shutil.rmtree(storage / name, ignore_errors=True)
    _say("1. A small GPT learns this machine's Python library: 2 workers, nobody disturbed.")
    if not _train(storage, "demo-calm"):
        return 1
    _say(f"2. The same again, and rank 1 is killed (kill -9) after step {_KILL_AT}.")
    killer = _Killer(RunFolder(storage, "demo-killed"))
    killer.start()
    if not _train(storage, "demo-killed"):
        return 1
    killer.done.set()
    if killer.killed_at is None:
        _say("The run was over before the worker could be killed: nothing was shown. Run it again.")
        return 1
    return _compare(RunFolder(storage, "demo-calm"), RunFolder(storage, "demo-killed"))


def _train(storage: Path, name: str) -> bool:
    settings = {
        "name": name,
        "storage": str(storage),
        "workers": 2,
        "device": "cpu",
        "checkpoint_every": str(_EVERY),
    }
    script = recipe_folder("gpt") / "train.py"
    return supervise(settings, Target(str(script), _SCRIPT_ARGUMENTS)).outcome is Outcome.FINISHED


class _Killer(threading.Thread):
    """Waits for rank 1 to pass a step, then kills it as the kernel's out-of-memory killer would."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.done = threading.Event()
        self.killed_at: int | None = None

    def run(self) -> None:
        while not self.done.wait(0.01):
            pulse = _pulse(self._folder.name, rank=1)
            if pulse is not None and pulse.step >= _KILL_AT:
                self.killed_at = pulse.step
                os.kill(pulse.pid, signal.SIGKILL)
                return


def _pulse(name: str, rank: int) -> Pulse | None:
    """That of one of this process's workers: only the pulse says which process it is, as a standby's environment is
    the same."""
    import json

    import psutil

    from keepstep.job import JOB

    for child in psutil.Process().children():
        try:
            environment = child.environ()
        except psutil.Error:
            continue
        if JOB in environment and environment.get("RANK") == str(rank):
            job = json.loads(environment[JOB])
            heart = Path(job["hearts"]) / f"rank_{rank}"
            if job["name"] == name and heart.exists():
                return Pulse(heart)
    return None


def _compare(calm: RunFolder, killed: RunFolder) -> int:
    expected, found = calm.read_metrics(), killed.read_metrics()
    same = expected == found
    replayed = [event for event in killed.read_events() if event["event"] == "resumed"]
    _say("3. What came of it.")
    print(f"   {'step':>6}  {'loss, undisturbed':>22}  {'loss, killed and resumed':>26}")
    for step in sorted({1, _EVERY * 2, _KILL_AT, _KILL_AT + 1, _KILL_AT + 10, _STEPS}):
        print(f"   {step:>6}  {_loss(expected, step):>22}  {_loss(found, step):>26}")
    steps = sum("loss" in line for line in expected)
    print(f"   resumed from step {', '.join(str(event['step']) for event in replayed)}; {steps} losses compared")
    verdict = "bitwise equal" if same else "DIFFERENT"
    print(f"   the losses are {verdict}, every one of them")
    ledger = total_ledger(killed.read_events(), killed.read_result())
    _say(f"4. Where the killed run's {ledger.total_s:.1f} s went.")
    for line in ledger.lines():
        print("   " + line)
    print(f"\nMore: keepstep show {killed.name} --storage {killed.path.parent}")
    return 0 if same else 1


def _loss(metrics: list[dict[str, float]], step: int) -> str:
    return next((repr(line["loss"]) for line in metrics if line["step"] == step and "loss" in line), "none")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)
    time.sleep(0.05)  # so that it stands before what the run prints on the other stream
    sys.stderr.flush()
