"""Which faults a run meets, and when: drawn from a seed, so that the same ones can be had again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from keepstep.errors import ConfigError

RANK, ALL, SAVE, STOP = "rank", "all", "save", "stop"
KILLS = (RANK, ALL, SAVE)
WORDS = {
    RANK: "a worker killed",
    ALL: "all workers killed",
    SAVE: "killed in a save",
    STOP: "stopped, started again",
}
_CHECKPOINTS = 10
"""How many a run shall have, about."""


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a run."""

    kind: str
    step: int
    """Not before this one is complete; of SAVE: the step that is being saved."""
    ranks: tuple[int, ...]
    """Who is killed; of STOP: nobody."""
    delay: float
    """How much of a step's time to wait once it is complete: so that faults come at every place within a step."""


def checkpoint_interval(given: int | None, num_steps: int) -> int:
    """Steps between checkpoints, so that there are several to go on from: as given, unless it is too many for that."""
    return given if given is not None and given <= num_steps // 3 else max(1, num_steps // _CHECKPOINTS)


def draw(seed: int, kills: int, num_steps: int, every: int, workers: int) -> list[Fault]:
    """`kills` kills, each kind of them at least once if there are three, and one request to stop, spread over a run."""
    count = kills + 1
    if num_steps < 3 * count:
        raise ConfigError(
            f"the script makes {num_steps} steps, which is too few for {count} faults; let it make at least "
            f"{3 * count}, or give a lower --kills"
        )
    # From behind the first step to before the last; a request to stop is met at the next save, at the latest.
    last = max(count, num_steps - 1 - every)
    source = random.Random(seed)
    kinds = [*source.sample(KILLS, min(kills, len(KILLS))), *source.choices(KILLS, k=max(0, kills - len(KILLS)))]
    kinds.insert(source.randrange((count + 1) // 2), STOP)  # early: from there another number of workers goes on
    faults = []
    for number, kind in enumerate(kinds):
        begin, end = (1 + last * place // count for place in (number, number + 1))  # each has a part to itself
        step = source.randrange(begin, max(begin + 1, end))
        if kind == SAVE:
            step = min(-(-step // every), num_steps // every) * every
        everybody = tuple(range(workers))
        one = (source.randrange(workers),)
        ranks = {RANK: one, ALL: everybody, SAVE: source.choice((one, everybody)), STOP: ()}[kind]
        faults.append(Fault(kind, step, ranks, source.random()))
    return faults
