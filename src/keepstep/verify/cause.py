"""Why a run came out otherwise: reasoned from what differed first, and from which lines could have brought it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.fingerprints.suspects import ENTROPY, TIME
from keepstep.fingerprints.variables import GENERATOR
from keepstep.verify.compare import METRICS, Comparison, Difference, by_step
from keepstep.verify.prints import Attempt, Print, Suspect, read_attempts
from keepstep.verify.source import Source

_MOST_PLACES = 5


@dataclass(frozen=True)
class Cause:
    """The likely cause, in words, and what to do."""

    kind: str
    text: str
    advice: str
    places: tuple[str, ...] = ()
    """`file:line`, the likeliest first."""

    @property
    def words(self) -> str:
        where = f" ({', '.join(self.places)})" if self.places else ""
        return f"{self.text}{where}. {self.advice}"


def of_lost_state(reference: Path, other: Path, first: Difference, source: Source) -> Cause:
    """Two undisturbed runs are the same, so what differs was lost over a restart."""
    if first.kind == "buffers":
        return Cause(
            "untracked-state",
            f"the buffer '{first.name}' is registered with persistent=False, so no checkpoint holds it",
            "Register it with persistent=True, or compute it anew from the step",
        )
    lost = lost_variables(read_attempts(reference), read_attempts(other), first)
    generators = [key for key, is_generator in lost.items() if is_generator]
    if generators:
        names, places = _named(generators, source)
        return Cause(
            "untracked-generator",
            f"{names} is a random number generator of the script's own: a restart begins its stream again",
            _TRACK_GENERATOR,
            places,
        )
    if lost:
        names, places = _named(list(lost), source)
        return Cause(
            "untracked-state",
            f"{names} had changed since the start of the loop, and a restart did not bring the change back",
            "run.track('name', obj) an object with state_dict() and load_state_dict() that holds it, or compute it "
            "from run.step",
            places,
        )
    made = [f"{file}:{line}" for file, line in source.generators()]
    if made and first.kind in ("samples", "weights"):
        return Cause(
            "untracked-generator",
            f"the {first.kind} differ after a restart, and the script has a random number generator of its own, seeded "
            "but not saved",
            _TRACK_GENERATOR,
            tuple(made[:_MOST_PLACES]),
        )
    return Cause(
        "untracked-state",
        f"the {first.kind} differ right after a restart: some state that they depend on is not saved with the run",
        "Look for what changes from step to step outside of what run.prepare was given, and run.track(...) it",
    )


_TRACK_GENERATOR = (
    "Draw from torch's, NumPy's or Python's global generators, which are saved, or run.track('name', obj) an object "
    "whose state_dict() holds the generator's state"
)


def lost_variables(
    expected: dict[int, list[Attempt]], found: dict[int, list[Attempt]], first: Difference
) -> dict[str, bool]:
    """Variables that were as in the reference until a restart, and were not when the first batch after it came.

    The first batch, for then the loop's body has not run yet: a variable that is there has its value from before the
    loop. → whether it is a generator.
    """
    rank = first.rank or 0
    if rank not in found or rank not in expected:
        return {}
    known = by_step(expected[rank])
    steady = _steady(known, found[rank][0])
    lost: dict[str, bool] = {}
    # After the first difference everything may differ for its sake. Metrics are not known by attempt.
    attempts = found[rank][first.attempt :][:1] if first.attempt else found[rank][1:]
    for attempt in (attempt for attempt in attempts if attempt.prints):
        begin = attempt.prints[0]
        before = known[begin.step].variables if begin.step in known else {}
        for key, value in begin.variables.items():
            if key in before and before[key] != value and key in steady:
                lost[key] = value.startswith(GENERATOR)
    return lost


def _steady(known: dict[int, Print], undisturbed: Attempt) -> set[str]:
    """Variables that are the same in the reference and in the other run, as long as that was not disturbed."""
    same: set[str] = set()
    other: set[str] = set()
    for entry in undisturbed.prints:
        before = known[entry.step].variables if entry.step in known else {}
        for key, value in entry.variables.items():
            (same if before.get(key) == value else other).add(key)
    return same - other


def _named(keys: list[str], source: Source) -> tuple[str, tuple[str, ...]]:
    """The variables in words, and their places."""
    names, places = [], []
    for key in keys[:_MOST_PLACES]:
        file, scope, name, path = key.split("|")
        names.append(f"'{path}.{name.removeprefix('self.')}'" if path else f"'{name}'")
        line = source.line_of(file, scope, name)
        places.append(f"{file}:{line}" if line else file)
    return " and ".join(dict.fromkeys(names)), tuple(dict.fromkeys(places))


def of_nondeterminism(
    calm: Comparison, suspects: list[Suspect], source: Source, device: str, hash_seed_helps: Callable[[], bool]
) -> Cause:
    """Two undisturbed runs differ. `hash_seed_helps`: whether they do not with one PYTHONHASHSEED, which takes time."""
    first = calm.first
    assert first is not None
    entropy = [s for s in suspects if s.kind == ENTROPY]
    entropy += [Suspect(ENTROPY, "Generator.seed", file, line, False) for file, line in source.unseeded_torch()]
    times = [s for s in suspects if s.kind == TIME]
    times += [Suspect(TIME, "datetime.now", file, line, False) for file, line in source.dates()]
    if first.kind in ("samples", METRICS):
        best = max([*entropy, *times], key=_weight, default=None)
        if best is not None and best.kind == TIME:
            return _time_dependent(first, sorted(times, key=_weight, reverse=True))
    if entropy:
        return _unseeded(first, sorted(entropy, key=_weight, reverse=True))
    orders = source.hash_orders()
    if hash_seed_helps():
        return Cause(
            "hash-order",
            f"the {first.kind} depend on the hash of strings or objects, which each process makes up anew: with "
            "PYTHONHASHSEED=0 two runs are equal",
            "Sort what comes from a set before it is gone through, and use hashlib in place of hash(); "
            "PYTHONHASHSEED=0 hides it",
            tuple(f"{file}:{line}" for file, line in orders[:_MOST_PLACES]),
        )
    if device == "cuda":
        return Cause(
            "nondeterministic-kernel",
            f"two undisturbed runs differ in the {first.kind} with the same samples and random numbers: a CUDA kernel "
            "adds in a varying order",
            "Run with --deterministic, which allows deterministic kernels only",
        )
    clock = f"; the clock is read at {', '.join(s.place for s in times[:_MOST_PLACES])}" if times else ""
    return Cause(
        "nondeterministic-kernel",
        f"two undisturbed runs differ in the {first.kind} with the same samples and random numbers: something computes "
        f"in a varying order, as threads that add up as they arrive do{clock}",
        "Look for threads, atomic additions and asynchronous results in the loop, and add up in a fixed order",
    )


def _weight(suspect: Suspect) -> float:
    """How likely a place is to change the data: one that is passed while a sample is read is likelier than others."""
    return 2.0 * suspect.in_data + (0.5 if suspect.kind == ENTROPY else 0.0)


def _time_dependent(first: Difference, times: list[Suspect]) -> Cause:
    what = "the samples depend" if first.kind == "samples" else f"the metric '{first.name}' depends"
    return Cause(
        "time-dependent-data",
        f"{what} on the clock: {times[0].what}() is called",
        "Take what it is used for from the sample's index, or from run.step",
        tuple(suspect.place for suspect in times[:_MOST_PLACES]),
    )


def _unseeded(first: Difference, entropy: list[Suspect]) -> Cause:
    return Cause(
        "unseeded-generator",
        f"the {first.kind} depend on {entropy[0].what}(), which is not seeded and gives other numbers in every process",
        "Give it a seed, or draw from torch's, NumPy's or Python's global generators, which the run seeds and saves",
        tuple(suspect.place for suspect in entropy[:_MOST_PLACES]),
    )
