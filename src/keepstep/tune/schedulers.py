"""Ray Tune's schedulers: who is stopped early, who becomes a copy of whom. What they knew is told to them again when a
search is resumed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler

from keepstep.tune.exploit import can_give, can_take
from keepstep.tune.journal import Journal, Record
from keepstep.tune.order import KEY, Place
from keepstep.tune.search import Search
from keepstep.tune.space import perturbed

_NO_LIMIT = 10**9
"""Of reports: how long a run is, its script knows."""
_KEPT = 3
"""One in so many goes on at each rung: at 1, 3, 9, 27 times --grace reports."""


class Asha(AsyncHyperBandScheduler):  # type: ignore[misc]
    """Tune's ASHA, which knows trials by their number: the same one before and after a resume."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, _by_number(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision: str = super().on_trial_result(tune_controller, _by_number(trial), result)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        super().on_trial_complete(tune_controller, _by_number(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_remove(tune_controller, _by_number(trial))


def _by_number(trial: Any) -> Any:
    return SimpleNamespace(trial_id=trial.config[KEY]["number"])


class Pbt(PopulationBasedTraining):  # type: ignore[misc]
    """Tune's population based training; what is copied are keepstep's checkpoints, and values stay within the space."""

    def __init__(
        self, search: Search, records: dict[int, Record], journal: Journal, place: Place, take_turns: bool
    ) -> None:
        """`take_turns`: whether trials must pause for others, for want of room."""
        super().__init__(
            time_attr="reports",
            metric="value",
            mode=_mode(search),
            perturbation_interval=search.grace,
            custom_explore_fn=lambda config: config,
            require_attrs=False,
            log_config=False,
        )
        self._search, self._records, self._journal, self._place = search, records, journal, place
        self._take_turns = take_turns

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        # A search that is resumed does not judge at once what was judged before.
        self._trial_state[trial].last_perturbation_time = trial.config[KEY]["reports"]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision: str = super().on_trial_result(tune_controller, trial, result)
        # Tune would also pause for a trial that is just becoming a copy.
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE and not self._take_turns else decision

    def _checkpoint_or_exploit(
        self, trial: Any, tune_controller: Any, upper_quantile: list[Any], lower_quantile: list[Any]
    ) -> None:
        """Tune's own copies what it has asked a donor to save before; a run has its newest at any time."""
        storage = self._place.storage
        donors = [each for each in upper_quantile if can_give(storage, each.config[KEY]["run"])]
        if trial in lower_quantile and donors and can_take(storage, trial.config[KEY]["run"]):
            config = self.copy_of(trial, random.choice(donors))
            tune_controller.pause_trial(trial, should_checkpoint=False)
            trial.set_config(config)

    def copy_of(self, trial: Any, donor_trial: Any) -> dict[str, Any]:
        """The configuration that makes a trial another's copy; written down first."""
        loser, donor = (self._records[each.config[KEY]["number"]] for each in (trial, donor_trial))
        order = 1 + max((record.copy.order for record in self._records.values() if record.copy), default=0)
        values = perturbed(self._search.space, donor.values, self._search.seed, order)
        fields = {"order": order, "donor": donor.number, "values_before": donor.values, "values": values}
        loser.take(self._journal.write("copy", loser.number, **fields))
        return {KEY: dataclasses.asdict(self._place.order(self._search, loser))}


def make_scheduler(search: Search, records: dict[int, Record], journal: Journal, place: Place, take_turns: bool) -> Any:
    if search.method == "asha":
        return make_asha(search)
    if search.method == "pbt":
        return Pbt(search, records, journal, place, take_turns)
    return FIFOScheduler()


def make_asha(search: Search) -> Asha:
    return Asha(
        time_attr="reports",
        metric="value",
        mode=_mode(search),
        max_t=_NO_LIMIT,
        grace_period=search.grace,
        reduction_factor=_KEPT,
    )


def replay(scheduler: Asha, entries: Iterable[dict[str, Any]]) -> set[int]:
    """Tells the scheduler all reports of the journal, in their order; returns the trials that it stops, as it did."""
    counts: dict[int, int] = {}
    stopped = set()
    for entry in entries:
        if entry["kind"] != "report":
            continue
        number = entry["trial"]
        trial = SimpleNamespace(config={KEY: {"number": number}})
        if number not in counts:
            scheduler.on_trial_add(None, trial)
        counts[number] = counts.get(number, 0) + 1
        result = {"reports": counts[number], "value": float(entry["value"])}
        if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
            stopped.add(number)
    return stopped


def _mode(search: Search) -> str:
    return "max" if search.higher_is_better else "min"
