"""Writes down what Ray Tune says of the trials, as it says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune import Callback

from keepstep.tune.journal import FAILED, STOPPED, STOPPED_EARLY, Journal, Record
from keepstep.tune.order import KEY
from keepstep.tune.progress import SearchDisplay


class Notes(Callback):  # type: ignore[misc]
    """Called after the scheduler: the journal's order is the order of its decisions."""

    def __init__(
        self,
        records: dict[int, Record],
        journal: Journal,
        display: SearchDisplay,
        summarise: Callable[[], None],
    ) -> None:
        self._records, self._journal, self._display, self._summarise = records, journal, display, summarise
        self._copies = {number: record.copy for number, record in records.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Tune writes itself down, with all it was given; nobody reads that, and a display cannot be written."""
        return object, ()

    def _record(self, trial: Any) -> Record:
        return self._records[trial.config[KEY]["number"]]

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if record.copy is not None and record.copy != self._copies[record.number]:
            self._copies[record.number] = record.copy
            self._display.copied(record)
        else:
            self._display.started(record)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        record = self._record(trial)
        if "status" in result:
            self._end(record, result["status"], result["reason"], max(record.step, result["at_step"]))
        else:
            fields = {"step": result["at_step"], "value": result["value"], "order": result["order"]}
            record.take(self._journal.write("report", record.number, **fields))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if not record.is_over and record.status != STOPPED:
            self._end(record, STOPPED_EARLY, "", record.step)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if not record.is_over:
            lines = str(trial.get_error() or "the trial's process died").strip().splitlines()
            self._end(record, FAILED, lines[-1], record.step)

    def _end(self, record: Record, status: str, reason: str, step: int) -> None:
        record.take(self._journal.write("end", record.number, status=status, reason=reason, step=step))
        self._display.ended(record)
        self._summarise()
