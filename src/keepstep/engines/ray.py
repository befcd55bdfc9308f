"""Workers on a Ray cluster: Ray Train v2 places a host for each, and replaces hosts whose node is lost."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.engines.base import Launch, Outcome
from keepstep.engines.ray_coordinator import Coordinator, View, ranks_by_node
from keepstep.engines.ray_relay import remove_mark, write_mark, write_pieces
from keepstep.engines.reports import without_torn_down
from keepstep.errors import ConfigError
from keepstep.failure import LOST_HOST, LOST_NODE, WorkerFailure, first_cause_first
from keepstep.job import JOB, TARGET
from keepstep.observe.hang import Request
from keepstep.observe.heart import Pulse
from keepstep.observe.recovery import Death

if TYPE_CHECKING:
    from keepstep.engines.ray_cluster import Cluster

_LOOK_S = 0.1
_CHECK_S = 2.0
_LEAVE_S = 10.0
_SAVE_S = 60.0
"""How long workers may take to save before their hosts are replaced all the same."""
_RESIZE_S = 30.0
"""How often Ray looks whether there is room for more workers: each time there is, all start again."""
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # its 2 s are most of the time in which it notices a lost node
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Of Ray Train, which has no other place for them; what the user has set stays."""


class Ray:
    """Runs Ray Train in a thread, so that the main one can decide, show progress and get signals."""

    def run(self, launch: Launch) -> Outcome:
        try:
            import ray.train  # noqa: F401
        except ImportError:
            raise ConfigError("--engine ray needs Ray: pip install 'keepstep[ray]'") from None
        from keepstep.engines.ray_cluster import Cluster

        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        storage = None if launch.folder.mirror is not None else launch.folder.path.absolute().parent
        with Cluster(launch.config, launch.device, storage) as cluster:
            cluster.check_room()
            with tempfile.TemporaryDirectory(prefix="keepstep-ray-") as scratch:
                return _Driver(launch, cluster, scratch).run()


class _Driver:
    """One run's attempts on one cluster."""

    def __init__(self, launch: Launch, cluster: Cluster, scratch: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._launch, self._cluster, self._scratch = launch, cluster, scratch
        # It lives where this process does: a node that is lost must not take it along.
        here = NodeAffinitySchedulingStrategy(cluster.here, soft=False)
        as_actor = ray.remote(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here)
        self._coordinator = as_actor(Coordinator).remote()
        self._mark = write_mark(launch.folder.path)
        self._outcome: Outcome | None = None
        self._judged = 0
        """The attempt whose end has been dealt with."""
        self._noticed = 0.0
        """When the present attempt's first failure was heard of."""
        self._told_to_stop = False
        self._next_check = time.monotonic() + _CHECK_S
        self._waiting_for: str | None = None
        self._ranks_by_node: dict[str, list[int]] = {}

    def run(self) -> Outcome:
        threads = ThreadPoolExecutor(2, "keepstep-ray")
        # The nodes are looked over while Ray places the hosts; no worker starts before.
        checked = threads.submit(self._cluster.check_nodes, self._launch.folder)
        fitted = threads.submit(lambda: self._trainer().fit())
        try:
            self._lead(checked, fitted)
        finally:
            self._ask("finish")
            wait([fitted], _LEAVE_S)
            threads.shutdown(wait=False, cancel_futures=True)  # one that waits for hosts ends with the connection
            remove_mark(self._launch.folder.path)
        if self._outcome is None:
            fitted.result()
            raise ConfigError("Ray Train ended before the workers did")
        return self._outcome

    def _trainer(self) -> Any:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from keepstep.engines.ray_callbacks import SaveBeforeResize
        from keepstep.engines.ray_host import serve

        config, need = self._launch.config, self._cluster.need
        return DataParallelTrainer(
            serve,
            train_loop_config={"coordinator": self._coordinator, "working_folder": self._cluster.working_folder},
            scaling_config=ScalingConfig(
                num_workers=(config.min_workers, config.max_workers) if config.is_elastic else config.max_workers,
                use_gpu=need.get("GPU", 0) > 0,
                resources_per_worker=need,
                elastic_resize_monitor_interval_s=_RESIZE_S,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=self._scratch,
                failure_config=FailureConfig(max_failures=-1),  # lost groups of hosts: the supervisor counts them
                callbacks=[SaveBeforeResize(self._coordinator, _SAVE_S)],
            ),
        )

    def _ask(self, what: str, *arguments: Any) -> Any:
        import ray

        return ray.get(self._tell(what, *arguments))

    def _tell(self, what: str, *arguments: Any) -> Any:
        return getattr(self._coordinator, what).remote(*arguments)

    # -- what happens -------------------------------------------------------------------------------------------------

    def _lead(self, checked: Future[None], fitted: Future[Any]) -> None:
        version = -1
        while self._outcome is None and not fitted.done():
            view = self._ask("look", version, _LOOK_S)
            version = view.version
            self._follow(view)
            if checked.done():
                checked.result()
                if self._outcome is None and view.is_complete and view.attempt == self._judged:
                    self._begin(view)
            if time.monotonic() > self._next_check:
                self._next_check = time.monotonic() + _CHECK_S
                self._look_at_cluster(view)
            self._pass_on(self._launch.watch())

    def _pass_on(self, request: Request | None) -> None:
        if request is Request.LOOK:
            self._tell("look_at_stacks")
        elif request is Request.ABORT:
            self._tell("abort")

    def _follow(self, view: View) -> None:
        """Brings here what the workers left on their machines, passes on a request to stop, and judges an end."""
        write_pieces(self._launch.folder.path, view.pieces)
        for rank, pulse in view.pulses.items():
            if pulse:
                Pulse(self._launch.hearts / f"rank_{rank}").follow(pulse)
        if self._launch.asked_to_stop() and not self._told_to_stop:
            self._told_to_stop = True
            self._ask("stop")
        if view.attempt > self._judged:
            self._judge(view)

    def _begin(self, view: View) -> None:
        for pulse in self._launch.hearts.glob("rank_*"):
            pulse.unlink()  # there may be fewer workers now
        self._launch.before_attempt()
        self._launch.folder.push()
        self._ranks_by_node = ranks_by_node(view.hosts)
        target = self._launch.target
        pickled = Path(target.what).read_bytes() if target.is_pickled else None
        environment = {JOB: os.environ[JOB], TARGET: self._cluster.as_shipped(target).to_json()}
        self._noticed = 0.0
        self._ask("begin", environment, pickled, self._mark)

    def _judge(self, view: View) -> None:
        """Decides, once an attempt is over: all of its workers have ended, or Ray has replaced its hosts."""
        is_replaced = view.group != view.attempt_group
        if not self._noticed and (is_replaced or any(view.ended.values())):
            self._noticed = time.time()
        if not is_replaced and len(view.ended) < len(view.hosts):
            return
        self._judged = view.attempt
        lost = self._lost(view) if is_replaced and not view.was_paused else []
        gone = {failure.rank for failure in lost}  # its last words may have come, and say less
        failures = lost + [failure for rank, failure in view.ended.items() if failure and rank not in gone]
        if failures:
            own = without_torn_down(failures)
            died = first_cause_first(own)[0].moment or self._noticed
            if not self._launch.on_failure(own, Death(died, max(died, self._noticed), time.time())):
                self._outcome = Outcome.FAILED
        elif not is_replaced and not view.was_paused:
            self._outcome = Outcome.FINISHED

    def _lost(self, view: View) -> list[WorkerFailure]:
        """Those who cannot say how they ended: their node is gone, or the process that Ray had placed there."""
        alive = {node.id for node in self._cluster.nodes}
        gone = sorted(rank for node, ranks in self._ranks_by_node.items() for rank in ranks if node not in alive)
        if gone:
            return [WorkerFailure(rank, LOST_NODE) for rank in gone]
        ranks = sorted(rank for ranks in self._ranks_by_node.values() for rank in ranks if rank not in view.ended)
        return [WorkerFailure(rank, LOST_HOST, moment=time.time()) for rank in ranks]

    def _look_at_cluster(self, view: View) -> None:
        """What Ray knows and does not say: nodes that will be taken away, and what is being waited for."""
        if view.attempt > self._judged:
            leaving = self._cluster.leaving & self._ranks_by_node.keys()
            if leaving and not view.was_paused:
                self._launch.say(f"keepstep: {len(leaving)} node(s) will be taken away: saving, to go on elsewhere")
                self._tell("pause", _SAVE_S)
        elif not view.is_complete:
            missing = self._cluster.missing()
            if missing is not None and missing != self._waiting_for:
                self._launch.say(f"keepstep: waiting for {missing}")
            self._waiting_for = missing
