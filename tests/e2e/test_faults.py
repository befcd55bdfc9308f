"""Every operation of a save fails once, in every way it can: nothing committed is lost, and the run ends the same.

`pytest tests/e2e/test_faults.py --slow -s` prints the table of docs/faults.md.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from e2e.faults import SAVE, SENSIBLE, STORE, Zygote
from keepstep.checkpoint.contents import check_contents
from keepstep.checkpoint.store import Manifest, Store
from keepstep.folder import RunFolder

pytest.importorskip("fsspec")
SAYS = {"ENOSPC": "No space left on device", "EACCES": "Permission denied"}
LAST = 9
KEEP = 2


@dataclass(frozen=True)
class Scenario:
    name: str
    flags: tuple[str, ...] = ("--checkpoint-mode", "sync")
    in_store: bool = False
    lasting: bool = True


SCENARIOS = [
    Scenario("sync"),
    Scenario("sync, once", lasting=False),
    Scenario("async", flags=()),
    Scenario("keep-best", flags=("--checkpoint-mode", "sync", "--keep-best", "score:max")),
    Scenario("object store", in_store=True),
]


@dataclass(frozen=True)
class Place:
    """Where one run lies: its folder, or its object store and the cache of one machine."""

    root: Path
    in_store: bool = False
    machine: str = "cache"

    @property
    def storage(self) -> str:
        return f"{STORE}://{self.root}/objects" if self.in_store else str(self.root / "runs")

    @property
    def run(self) -> Path:
        found = list((self.root / self.machine).glob("*/a")) if self.in_store else [self.root / "runs" / "a"]
        return found[0] if found else self.root / "none"

    @property
    def here(self) -> Store:
        return Store(self.run / "checkpoints", keep=KEEP)

    def committed(self) -> list[int]:
        """Every step to resume from; raises if one of them is not good."""
        steps = set(_good(self.here))
        if self.in_store:
            steps |= set(self.in_objects())
        return sorted(steps)

    def in_objects(self) -> list[int]:
        return _good(Store(self.root / "objects" / "a" / "checkpoints", keep=KEEP), needs_manifest=True)

    def events(self, kind: str) -> list[dict[str, Any]]:
        folder = RunFolder(self.run.parent, "a")
        return [event for event in folder.read_events() if event["event"] == kind]

    def result(self) -> dict[str, Any]:
        """All that must be the same, whatever happened on the way: weights, generators, position, metrics, names."""
        manifest = self.here.read_manifest(LAST)
        objects = self.root / "objects" / "a"
        return {
            "files": manifest.files,
            "metrics": (self.run / "metrics.jsonl").read_text(),
            "result": json.loads((self.run / "result.json").read_text())["metrics"],
            "names": _names(self.run),
            "objects": _names(objects) if self.in_store else [],
        }


def _good(store: Store, needs_manifest: bool = False) -> list[int]:
    steps = [step for step in store.steps() if not needs_manifest or (store.path(step) / "manifest.json").exists()]
    for step in steps:
        store.check(step)
        check_contents(store, step)
    return steps


def _names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if "damaged-" not in name)


@dataclass
class Bench:
    """Two processes that fork, and the table."""

    root: Path
    zygotes: SimpleQueue[Zygote] = field(default_factory=SimpleQueue)
    rows: dict[tuple[str, str, str], Counter[tuple[str, bool]]] = field(default_factory=lambda: defaultdict(Counter))

    def run(self, place: Place, scenario: Scenario, **job: Any) -> tuple[int, str]:
        place.root.mkdir(parents=True, exist_ok=True)
        zygote = self.zygotes.get()
        try:
            return zygote.run(
                root=str(place.root),
                storage=place.storage,
                cache=str(place.root / place.machine),
                log=str(place.root / job.pop("log_name", "log")),
                flags=list(scenario.flags),
                **job,
            )
        finally:
            self.zygotes.put(zygote)

    def calm(self, scenario: Scenario) -> tuple[dict[str, Any], dict[str, Any]]:
        """What an undisturbed run leaves, and the operations of its third save."""
        place = Place(self.root / f"calm-{scenario.name}", scenario.in_store)
        trace = place.root / "trace"
        code, output = self.run(place, scenario, trace=str(trace))
        assert code == 0, output
        return place.result(), json.loads(trace.read_text())

    def note(self, what: str, fault: str, kind: str, resumed: str, equal: bool) -> None:
        self.rows[what, fault, kind][resumed, equal] += 1

    def table(self) -> str:
        columns = ("run", "fault", "at", "injected", "goes on from", "steps made again", "bitwise equal")
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        runs = list(dict.fromkeys(what for what, _, _ in self.rows))
        for (what, fault, kind), outcomes in sorted(self.rows.items(), key=lambda row: (runs.index(row[0][0]), row[0])):
            steps: Counter[str] = Counter()
            for (resumed, _), count in outcomes.items():
                steps[resumed] += count
            ways = ", ".join(f"{step} ({count})" for step, count in sorted(steps.items()))
            again = max(SAVE - int(step[-1]) if step[-1].isdigit() else 0 for step in steps)
            total, equal = sum(outcomes.values()), sum(n for (_, same), n in outcomes.items() if same)
            lines.append(f"| {what} | {fault} | {kind} | {total} | {ways} | {again} | {equal} of {total} |")
        return "\n".join([*lines, f"\n{sum(sum(row.values()) for row in self.rows.values())} faults"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("faults"))
    zygotes = [Zygote(), Zygote()]
    for zygote in zygotes:
        bench.zygotes.put(zygote)
    yield bench
    for zygote in zygotes:
        zygote.close()
    print(f"\n\n{bench.table()}")


def check_all(cases: list[Any], check: Callable[[Any], None]) -> None:
    """Checks cases two at a time; one report of all that went wrong."""

    def attempt(case: Any) -> str | None:
        try:
            check(case)
        except Exception as error:
            return f"{case}: {type(error).__name__}: {error}"
        return None

    with ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(attempt, cases) if problem]
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n\n".join(problems)


# -- faults in a save -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_fault_in_a_save_loses_what_was_committed(
    bench: Bench, scenario: Scenario, request: pytest.FixtureRequest
) -> None:
    """A fault at a third of a save's operations, drawn afresh in every run; with --slow at each of them."""
    calm, trace = bench.calm(scenario)
    operations = [kind for kind, _ in trace["operations"]]
    assert len(operations) > 30 and {"open", "write", "fsync", "rename", "mkdir"} <= set(operations)
    cases = [(fault, at) for fault in SENSIBLE for at, kind in enumerate(operations) if kind in SENSIBLE[fault]]
    if not scenario.lasting:
        cases = [(fault, at) for fault, at in cases if fault != "SIGKILL"]  # which is for ever
    if not request.config.getoption("--slow"):
        seed = random.randrange(10**6)
        print(f"seed {seed}")
        cases = random.Random(seed).sample(cases, len(cases) // 3)
    check_all(cases, lambda case: one_fault(bench, scenario, calm, trace, *case))


def one_fault(bench: Bench, scenario: Scenario, calm: dict[str, Any], trace: Any, fault: str, at: int) -> None:
    kind = trace["operations"][at][0]
    place = Place(bench.root / f"{scenario.name}-{fault}-{at}", scenario.in_store)
    code, output = bench.run(place, scenario, fault=fault, at=at, lasting=scenario.lasting)
    if code == 0:  # deleting is not worth a run
        assert kind == "delete" or (kind == "unlink" and not scenario.lasting), output
        resumed = "needs no resume"
    else:
        newest = check_what_is_left(place, trace, at)
        check_said(code, output, fault, newest)
        if scenario.in_store and fault == "SIGKILL":
            go_on_elsewhere(bench, scenario, place, calm)
        code, output = bench.run(place, scenario)
        assert code == 0, output
        step = place.events("resumed")[-1]["step"]
        assert step == newest, f"went on from {step}; {newest} was there"
        resumed = f"step {step}"
    found = place.result()
    bench.note(scenario.name, fault, kind, resumed, found == calm)
    assert found == calm, {name: (found[name], calm[name]) for name in calm if found[name] != calm[name]}
    shutil.rmtree(place.root)


def check_what_is_left(place: Place, trace: Any, at: int) -> int:
    """All that was committed is there and good, but what newer ones have replaced; returns the newest step."""
    steps = place.committed()
    names = [(kind, name) for kind, name in trace["operations"][:at]]
    if any(kind == "rename" and name.endswith(Store.name(SAVE)) for kind, name in names):
        assert SAVE in place.here.steps(), f"step {SAVE} was committed, and is gone"
    keep = 1 if place.in_store else KEEP
    for step in trace["before"]:
        assert step in steps or sum(newer > step for newer in steps) >= keep, f"step {step} is gone: {steps}"
    if place.in_store:
        there = place.in_objects()
        committed = any(kind == "upload" and name.endswith(f"{Store.name(SAVE)}/manifest.json") for kind, name in names)
        assert there == ([4, 6] if committed and 2 not in there else [2, 4, 6] if committed else [2, 4]), there
    best = place.here.best()
    assert best is None or best["step"] in steps, f"the best, {best}, is gone: {steps}"
    return steps[-1]


def check_said(code: int, output: str, fault: str, newest: int) -> None:
    """One line, with the cause and what there is to go on from."""
    if fault == "SIGKILL":
        assert code == -9, output
        return
    assert code == 2, output
    assert "Traceback" not in output, output
    said = [line for line in output.splitlines() if line.startswith("keepstep: ") and "run 'a' in" not in line]
    said = [line for line in said if not line.startswith("keepstep: old checkpoints stay")]
    (line,) = said
    assert SAYS[fault] in line and f"step {newest}" in line, line


def go_on_elsewhere(bench: Bench, scenario: Scenario, place: Place, calm: dict[str, Any]) -> None:
    """A machine that has nothing but the object store goes on from what is in there."""
    other = Place(place.root.with_name(f"{place.root.name}-elsewhere"), True, "other-cache")
    shutil.copytree(place.root / "objects", other.root / "objects")
    (other.root / "objects" / "a" / "holder.json").unlink()  # as after three minutes of silence
    newest = other.in_objects()[-1]
    code, output = bench.run(other, scenario)
    assert code == 0, output
    assert other.events("resumed")[-1]["step"] == newest
    found = other.result()
    bench.note("object store, other machine", "SIGKILL", "any", f"step {newest}", found == calm)
    assert found == calm, {name: (found[name], calm[name]) for name in calm if found[name] != calm[name]}
    shutil.rmtree(other.root)


# -- damage between runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(bench: Bench) -> dict[str, tuple[Place, dict[str, Any]]]:
    """Scenario → a run that was killed when steps 4 and 6 were committed, and what it would have become."""
    runs = {}
    for scenario in (SCENARIOS[0], SCENARIOS[3]):
        calm, trace = bench.calm(replace(scenario, name=f"{scenario.name}, killed"))
        place = Place(bench.root / f"killed-{scenario.name}")
        code, output = bench.run(place, scenario, fault="SIGKILL", at=len(trace["operations"]) - 1)
        assert code == -9 and place.committed()[-2:] == [4, SAVE], output
        runs[scenario.name] = place, calm
    return runs


def copied(place: Place, name: str) -> Place:
    copy = Place(place.root.with_name(f"{place.root.name}-{name}"))
    shutil.copytree(place.root, copy.root)
    return copy


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "flipped bit": flip,
    "deleted": lambda path: path.unlink(),
}
FILES = ("manifest.json", "state.json", "tensors.json", "rank_00000.safetensors")


def empty_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def test_what_is_damaged_is_passed_over_by_name(bench: Bench, killed: dict[str, Any]) -> None:
    place, calm = killed["sync"]
    cases: list[tuple[str, str]] = [(how, name) for how in DAMAGE for name in FILES]

    def check(case: tuple[str, str]) -> None:
        how, name = case
        damaged = copied(place, f"{how}-{name}")
        folder = damaged.here.path(SAVE)
        empty_folder(folder) if name == "folder" else DAMAGE[how](folder / name)
        code, output = bench.run(damaged, SCENARIOS[0])
        assert code == 0, output
        (passed_over,) = damaged.events("checkpoint_passed_over")
        assert passed_over["problem"].startswith(Store.name(SAVE)), passed_over
        assert name in passed_over["problem"] or name == "folder", passed_over
        assert passed_over["problem"] in output
        assert len(list((damaged.run / "checkpoints").glob(f"damaged-{Store.name(SAVE)}-*"))) == 1
        step, found = damaged.events("resumed")[-1]["step"], damaged.result()
        bench.note("between runs", how, "folder" if name == "folder" else "each file", f"step {step}", found == calm)
        assert step == 4 and found == calm

    check_all([*cases, ("emptied", "folder")], check)


# -- what cannot be read now ------------------------------------------------------------------------------------------

UNREADABLE = [
    *(("files", number) for number in (errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT)),
    *(("folders", number) for number in (errno.EIO, errno.EACCES)),
    *(("list", number) for number in (errno.EIO, errno.EACCES)),
    ("best", errno.EIO),
]


def contents(place: Place) -> dict[str, bytes]:
    folder = place.run / "checkpoints"
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(bench: Bench, place: Place, scenario: Scenario, reason: str, **job: Any) -> None:
    """In one line, with nothing changed."""
    before = contents(place)
    code, output = bench.run(place, scenario, **job)
    assert code != 0 and "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("keepstep: ")]
    assert reason in line, line
    assert contents(place) == before
    assert len(place.events("started")) == 1, "it began anew"


def test_what_cannot_be_read_now_is_neither_passed_over_nor_begun_anew(bench: Bench, killed: dict[str, Any]) -> None:
    def check(case: tuple[str, int]) -> None:
        what, number = case
        scenario = SCENARIOS[3]  # which has a best.json, too
        place, calm = killed[scenario.name]
        dark = copied(place, f"{what}-{number}")
        refused(bench, dark, scenario, os.strerror(number), unreadable=case)
        code, output = bench.run(dark, scenario)
        assert code == 0, output
        step, found = dark.events("resumed")[-1]["step"], dark.result()
        bench.note("reading", errno.errorcode[number], what, f"refused, then step {step}", found == calm)
        assert step == SAVE and found == calm

    check_all(UNREADABLE, check)


def test_a_newer_versions_checkpoint_is_neither_passed_over_nor_begun_anew(
    bench: Bench, killed: dict[str, Any]
) -> None:
    place, calm = killed["sync"]
    newer = copied(place, "newer")
    manifest = newer.here.path(SAVE) / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(replace(Manifest.from_json(text), format=2).to_json())
    refused(bench, newer, SCENARIOS[0], "its format is 2; this keepstep reads format 1")
    manifest.write_text(text)
    code, output = bench.run(newer, SCENARIOS[0])
    assert code == 0, output
    assert newer.events("resumed")[-1]["step"] == SAVE and newer.result() == calm


# -- clocks and neighbours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["start", "save"])
def test_a_clock_that_goes_back_changes_nothing(bench: Bench, killed: dict[str, Any], clock: str) -> None:
    """Between two runs, or between two saves of one: the newest step is the newest, whatever its date."""
    place, calm = killed["sync"]
    early = copied(place, f"clock-{clock}") if clock == "start" else Place(bench.root / f"clock-{clock}")
    code, output = bench.run(
        early, SCENARIOS[0], clock=clock, **({} if clock == "start" else {"fault": "SIGKILL", "at": 33})
    )
    if clock == "save":
        assert code == -9 and early.committed() == [4, SAVE], output
        dates = [early.here.read_manifest(step).created for step in (4, SAVE)]
        assert dates[1] < dates[0], "the clock did not go back"
        code, output = bench.run(early, SCENARIOS[0])
    assert code == 0, output
    step, found = early.events("resumed")[-1]["step"], early.result()
    bench.note(
        f"between {'runs' if clock == 'start' else 'saves'}", "clock back", "a day", f"step {step}", found == calm
    )
    assert step == SAVE and found == calm


def test_a_second_run_of_the_name_is_told_who_holds_it(bench: Bench) -> None:
    scenario = SCENARIOS[0]
    calm, _ = bench.calm(replace(scenario, name="alone"))
    place = Place(bench.root / "two")
    mark = bench.root / "first"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bench.run, place, scenario, pause=str(mark))
        while not (mark.exists() and mark.read_text()):
            assert not first.done(), first.result()
            time.sleep(0.01)
        who = f"process {mark.read_text()} on {socket.gethostname()}"
        second = replace(place, machine="cache-2")
        code, output = bench.run(second, scenario, log_name="log-2")
        mark.unlink()
        assert code == 2 and output.splitlines() == [
            f"keepstep: run folder: run 'a' is running already, in {who}; wait for it, stop it, or give another --name"
        ]
        assert first.result()[0] == 0
    bench.note("two at once", "same name", "start", "second refused", place.result() == calm)
    assert place.result() == calm
