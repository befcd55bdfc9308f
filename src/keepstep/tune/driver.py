"""Runs a search: Ray Tune in a thread, so that this one can show how far it is and be asked to stop."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import ray
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keepstep.engines.ray_cluster import Cluster
from keepstep.errors import ConfigError
from keepstep.signals import StopSignals
from keepstep.tune.board import Board, Reported
from keepstep.tune.journal import STOPPED_EARLY, Journal, Record
from keepstep.tune.notes import Notes
from keepstep.tune.order import KEY, Place
from keepstep.tune.progress import SearchDisplay
from keepstep.tune.reservation import as_one_worker, num_at_once
from keepstep.tune.schedulers import Asha, make_scheduler, replay
from keepstep.tune.search import Search
from keepstep.tune.trial import Trial

_WATCH_S = 0.5
_FOR_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the runs have their own metrics
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the end of a run is no report
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # the journal is what a search is resumed from
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "86400",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # scripts read files beside them
    "RAY_AIR_NEW_OUTPUT": "0",
}


class Driver:
    """One launch of a search."""

    def __init__(
        self, search: Search, records: dict[int, Record], journal: Journal, summarise: Callable[[], None]
    ) -> None:
        """`summarise`: called whenever a trial is over."""
        self._search, self._records, self._journal, self._summarise = search, records, journal, summarise
        # Beside the journal, which all nodes see: for what Ray Tune writes, and nobody needs afterwards.
        self._scratch = journal.path.absolute().with_name(".ray")
        self._display = SearchDisplay(search, records)
        self._variants = BasicVariantGenerator()
        self._board: Any = None
        self._asked = False
        self.stopped = False
        """Whether it ended because it was asked to."""

    def run(self, cluster: Cluster, storage: str) -> None:
        os.environ.update(_FOR_TUNE)
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        has_gpus = self._search.device != "cpu" and any(node.resources.get("GPU") for node in cluster.nodes)
        whole = as_one_worker(self._search.launch, has_gpus)
        try:
            Cluster(whole, self._search.device, None).check_room()
        except ConfigError as error:
            raise ConfigError(f"a trial is placed whole on one node, as if it were 1 worker: {error}") from None
        need, name = whole.resources_per_worker, f"keepstep-tune-{uuid.uuid4().hex[:8]}"
        at_once = num_at_once(cluster.nodes, need, len(self._records))
        place = Place(storage, cluster.as_shipped(self._search.target), cluster.working_folder, name)
        take_turns = at_once < len(self._records)
        scheduler = make_scheduler(self._search, self._records, self._journal, place, take_turns)
        if isinstance(scheduler, Asha):
            self._note_stopped(replay(scheduler, self._journal.entries()))
        waiting = [record for record in self._records.values() if not record.is_over]
        if not waiting:
            return
        at_once = min(at_once, len(waiting))
        self._display.say(f"keepstep: search '{self._search.name}', {len(waiting)} trials to run, {at_once} at once")
        known = {r.number: Reported(len(r.reports), r.last_step, r.order_of_last_report) for r in waiting}
        here = NodeAffinitySchedulingStrategy(cluster.here, soft=False)  # not on a node that may be lost without us
        self._board = ray.remote(num_cpus=0)(Board).options(name=name, scheduling_strategy=here).remote(known)
        if self._search.method != "pbt":  # whose trials take turns, and must all be known
            self._variants.max_concurrent = at_once
        orders = [dataclasses.asdict(place.order(self._search, record)) for record in waiting]
        self._fit(self._tuner(orders, need, scheduler))

    def _note_stopped(self, numbers: set[int]) -> None:
        """Trials that were to be stopped when the search was killed, before that could be written down."""
        for number in numbers & set(self._records):
            record = self._records[number]
            if not record.is_over:
                entry = {"status": STOPPED_EARLY, "reason": "", "step": record.step}
                record.take(self._journal.write("end", number, **entry))

    def _tuner(self, orders: list[dict[str, Any]], need: dict[str, float], scheduler: Any) -> tune.Tuner:
        notes = Notes(self._records, self._journal, self._display, self._summarise)
        return tune.Tuner(
            tune.with_resources(Trial, tune.PlacementGroupFactory([need])),
            param_space={KEY: tune.grid_search(orders)},
            tune_config=tune.TuneConfig(search_alg=self._variants, scheduler=scheduler, reuse_actors=False),
            run_config=tune.RunConfig(
                name=uuid.uuid4().hex[:8],
                storage_path=str(self._scratch),
                verbose=0,
                callbacks=[notes],
                # Of the trial itself, as when a node is lost; failures of its run are the run's to mend.
                failure_config=tune.FailureConfig(max_failures=self._search.launch.max_failures),
            ),
        )

    def _fit(self, tuner: tune.Tuner) -> None:
        box: dict[str, BaseException] = {}

        def work() -> None:
            try:
                with warnings.catch_warnings(action="ignore"):  # Tune's advice is for its own users
                    tuner.fit()
            except BaseException as error:  # handed to the main thread
                box["error"] = error

        thread = threading.Thread(target=work, name="keepstep-tune", daemon=True)
        signals = StopSignals(self._ask_to_stop)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_WATCH_S)
                self._watch()
        finally:
            signals.restore()
            self._display.close()
            shutil.rmtree(self._scratch, ignore_errors=True)
        if "error" in box and not self.stopped:
            raise box["error"]

    def _ask_to_stop(self) -> None:
        self._asked = True  # passed on outside of the signal's handler
        self._display.say("keepstep: asked to stop: trials save at their next step (again: stop at once)", "yellow")

    def _watch(self) -> None:
        if self._asked and not self.stopped:
            self.stopped = True
            self._variants.set_finished()
            self._board.ask_to_stop.remote()
        self._display.tick(ray.get(self._board.steps.remote()))
