"""MLflow: one run of the experiment, on whatever MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import time
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from keepstep.observe.sinks.base import FAILED, FINISHED, STOPPED, About, values_of, words_for

_ID = "keepstep.id"
"""The tag by which the run is found again."""
_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
_LONGEST = 500
"""Letters of a parameter or tag, in any version."""


class MLflow:
    """Talks to the server (or to a store on the disk) by MLflow's own client, which tries again by itself."""

    lasting = True

    def __init__(self, about: About) -> None:
        self._about = about
        self._client = MlflowClient()
        self._run_id = ""
        self._num_failures = 0

    def open(self) -> str:
        experiment = self._experiment()
        run = self._find(experiment) or self._create(experiment)
        self._run_id = run.info.run_id
        self._num_failures = int(run.data.tags.get("keepstep.failures", 0))
        self._client.update_run(self._run_id, status="RUNNING")
        return f"run {self._run_id} at {self._client.tracking_uri}"

    def _experiment(self) -> str:
        chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if chosen:
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "keepstep"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _find(self, experiment: str) -> Run | None:
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{self._about.id}'", max_results=1)
        return found[0] if found else None

    def _create(self, experiment: str) -> Run:
        run = self._client.create_run(experiment, run_name=self._about.title, tags={_ID: self._about.id})
        parameters = [Param(_name(name), value[:_LONGEST]) for name, value in self._about.parameters.items()]
        self._client.log_batch(run.info.run_id, params=parameters[:100])
        return run

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        metrics = self._client.get_run(self._run_id).data.to_proto().metrics
        there = {metric.key: int(metric.step) for metric in metrics}
        return {name: there[_name(name)] for name in {*noted, *there} if _name(name) in there}

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        now = int(1000 * time.time())
        sent = [
            Metric(_name(name), value, now, line["step"]) for line in lines for name, value in values_of(line).items()
        ]
        self._client.log_batch(self._run_id, metrics=sent)

    def event(self, event: dict[str, Any]) -> None:
        words = words_for(event)
        if words is None:
            return
        kind, text = words
        tags = [RunTag(f"keepstep.{kind}", text[:_LONGEST])]
        if kind == "failure":
            self._num_failures += 1
            tags.append(RunTag("keepstep.failures", str(self._num_failures)))
        self._client.log_batch(self._run_id, tags=tags)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])

    def abandon(self) -> None:
        pass


def _name(name: str) -> str:
    """MLflow takes letters, digits and some signs."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
