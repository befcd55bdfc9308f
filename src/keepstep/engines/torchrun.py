"""Several workers on one machine, or several machines by hand: torchrun's own agent, rendezvous and restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from keepstep.config import LaunchConfig
from keepstep.engines.base import Launch, Outcome
from keepstep.engines.reports import failure_of, log_size, without_torn_down
from keepstep.engines.requests import obey
from keepstep.errors import ConfigError
from keepstep.failure import WorkerFailure
from keepstep.job import LOGS, SUPERVISOR, TARGET

_POLL_S = 0.05


class Torchrun:
    """Runs torch.distributed.elastic's agent in a thread, so that the main one can show progress and get signals."""

    def run(self, launch: Launch) -> Outcome:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # keepstep reports in its own words
        config = launch.config
        # The agent keeps one store for all attempts, in which workers would find the addresses of their dead
        # predecessors; so rank 0 makes a new one each time.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ[SUPERVISOR] = str(os.getpid())
        os.environ[TARGET] = launch.target.to_json()
        os.environ[LOGS] = str(launch.folder.logs.resolve())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.workers_per_node)))
        if config.nodes == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        with tempfile.TemporaryDirectory(prefix="keepstep-errors-") as error_folder:
            return self._run_agent(launch, error_folder)

    def _run_agent(self, launch: Launch, error_folder: str) -> Outcome:
        parameters = _rendezvous(launch.config)
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        agent = _Agent(launch, handler, error_folder)
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box["result"] = agent.run()
            except BaseException as error:  # handed to the main thread
                box["error"] = error

        thread = threading.Thread(target=work, name="keepstep-agent", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
                obey(launch.watch(), launch.hearts)
        except BaseException:
            # A second Ctrl-C, or an error of our own: the workers must not outlive us.
            agent.kill()
            raise
        finally:
            with contextlib.suppress(Exception):
                handler.shutdown()
        if "error" in box:
            raise box["error"]
        return Outcome.FAILED if box["result"].is_failed() else Outcome.FINISHED


class _Agent(LocalElasticAgent):
    """torchrun's agent, which asks the supervisor before it restarts the workers."""

    def __init__(self, launch: Launch, handler: Any, error_folder: str) -> None:
        self._launch = launch
        self._log_starts: dict[str, int] = {}
        config = launch.config
        spec = WorkerSpec(
            role="worker",
            local_world_size=config.workers_per_node,
            entrypoint=sys.executable,
            args=("-c", "from keepstep.worker import main; main()"),
            rdzv_handler=handler,
            # The supervisor counts; a restart that it did not forbid is always allowed.
            max_restarts=10**6,
            monitor_interval=_POLL_S,
            local_addr="127.0.0.1" if config.nodes == 1 else None,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=error_folder), exit_barrier_timeout=60)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._launch.before_attempt()
        self._log_starts = {path.name: log_size(path) for path in self._launch.folder.logs.glob("rank_*.txt")}
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            failures = [self._failure(rank, failure) for rank, failure in result.failures.items()]
            if not self._launch.on_failure(without_torn_down(failures)):
                self._remaining_restarts = 0
        return result

    def _failure(self, rank: int, failure: ProcessFailure) -> WorkerFailure:
        log = self._launch.folder.logs / f"rank_{rank}.txt"
        return failure_of(rank, failure.exitcode, failure.error_file, log, self._log_starts.get(log.name, 0))

    def kill(self) -> None:
        if self._pcontext is not None:
            self._pcontext.close(timeout=1)


def _rendezvous(config: LaunchConfig) -> RendezvousParameters:
    if config.nodes == 1:
        endpoint, is_host = "localhost:0", True
    else:
        assert config.rendezvous is not None
        endpoint, is_host = config.rendezvous, config.node_rank == 0
        if not endpoint.rpartition(":")[2].isdigit():
            raise ConfigError(f"--rendezvous is {endpoint!r}; give HOST:PORT of node 0, as node0.example:29400")
    return RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=os.environ.get("KEEPSTEP_RENDEZVOUS_ID", "keepstep"),
        min_nodes=config.nodes,
        max_nodes=config.nodes,
        local_addr="127.0.0.1" if config.nodes == 1 else None,
        is_host=is_host,
    )
