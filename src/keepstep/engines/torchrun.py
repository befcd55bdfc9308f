"""Several workers on one machine, or several machines by hand: torchrun's own agent, rendezvous and restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from keepstep.config import LaunchConfig
from keepstep.engines.base import Launch, Outcome
from keepstep.engines.reports import failure_of, log_size, without_torn_down
from keepstep.engines.requests import obey
from keepstep.engines.standby import Standby, Standbys
from keepstep.errors import ConfigError
from keepstep.failure import WorkerFailure, first_cause_first
from keepstep.job import IMPORTS, LOGS, SUPERVISOR, TARGET
from keepstep.observe.recovery import Death
from keepstep.standby import WORKER

_POLL_S = 0.05
_TERMINATE_S = 1
"""How long a worker may take to leave when it is told to, before it is killed."""


class Torchrun:
    """Runs torch.distributed.elastic's agent in a thread, so that the main one can show progress and get signals."""

    def run(self, launch: Launch) -> Outcome:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # keepstep reports in its own words
        config = launch.config
        # On several nodes the agents keep one store for all attempts, in which workers would find the addresses of
        # their dead predecessors; so rank 0 makes a new one each time.
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
        handler = _rendezvous(launch.config)
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
            agent.close_standbys()
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
        self._standbys = Standbys()
        self._seen_alive = time.time()
        config = launch.config
        spec = WorkerSpec(
            role="worker",
            local_world_size=config.workers_per_node,
            entrypoint=sys.executable,
            args=("-c", WORKER),
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
        for noted in self._launch.hearts.glob(f"{IMPORTS}*"):
            noted.unlink()
        # The agent has no place for another kind of process context than torch's own two.
        torchs: Any = local_elastic_agent
        original, torchs.start_processes = torchs.start_processes, self._start_processes
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            torchs.start_processes = original
        return started

    def _start_processes(self, start_method: str, **how: Any) -> SubprocessContext:
        context = _Processes(self._standbys, **how)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        looked = time.time()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._seen_alive = looked
            if self._launch.config.max_failures > 0:
                self._keep_standbys(worker_group)
        if result.state == WorkerState.FAILED:
            failures = [self._failure(rank, failure) for rank, failure in result.failures.items()]
            own = without_torn_down(failures)
            cause = first_cause_first(own)[0]
            died = cause.moment if cause.is_exception else self._seen_alive  # it has said when, or could not
            if not self._launch.on_failure(own, Death(died, looked, time.time())):
                self._remaining_restarts = 0
        return result

    def _failure(self, rank: int, failure: ProcessFailure) -> WorkerFailure:
        log = self._launch.folder.logs / f"rank_{rank}.txt"
        return failure_of(rank, failure.exitcode, failure.error_file, log, self._log_starts.get(log.name, 0))

    def _keep_standbys(self, worker_group: WorkerGroup) -> None:
        """In the agent's own thread: standbys, as workers do, die with the thread that starts them."""
        assert self._pcontext is not None
        for worker in worker_group.workers:
            imports = self._launch.hearts / f"{IMPORTS}{worker.global_rank}"
            if imports.exists():  # its first step is made: now it does not disturb the start
                environment = {**os.environ, **self._pcontext.envs[worker.local_rank]}
                self._standbys.keep(worker.local_rank, environment, imports)

    def kill(self) -> None:
        if self._pcontext is not None:
            self._pcontext.close(timeout=1)

    def close_standbys(self) -> None:
        self._standbys.close()


class _Processes(SubprocessContext):
    """torchrun's workers; those for whom there is a standby are made of it."""

    def __init__(self, standbys: Standbys, **how: Any) -> None:
        super().__init__(**how)
        self._standbys = standbys

    def _start(self) -> None:
        self.subprocess_handlers = {
            local_rank: _Process(
                self._standbys.take(local_rank),
                entrypoint=self.entrypoint,
                args=self.args[local_rank],
                env=self.envs[local_rank],
                stdout=self.stdouts[local_rank],
                stderr=self.stderrs[local_rank],
                local_rank_id=local_rank,
                numa_options=self._numa_options,
            )
            for local_rank in range(self.nprocs)
        }

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        super()._close(death_sig, min(timeout, _TERMINATE_S))


class _Process(SubprocessHandler):
    def __init__(self, standby: Standby | None, **how: Any) -> None:
        self._standby = standby
        super().__init__(**how)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        if self._standby is not None:
            if self._standby.become(env):
                return self._standby.process
            self._standby.close()
        started: subprocess.Popen[Any] = super()._popen(args, env)
        return started


def _rendezvous(config: LaunchConfig) -> RendezvousHandler:
    if config.nodes == 1:
        return _Alone()
    assert config.rendezvous is not None
    endpoint, is_host = config.rendezvous, config.node_rank == 0
    if not endpoint.rpartition(":")[2].isdigit():
        raise ConfigError(f"--rendezvous is {endpoint!r}; give HOST:PORT of node 0, as node0.example:29400")
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=_run_id(),
        min_nodes=config.nodes,
        max_nodes=config.nodes,
        local_addr=None,
        is_host=is_host,
    )
    handler: RendezvousHandler = rendezvous_registry.get_rendezvous_handler(parameters)
    return handler


def _run_id() -> str:
    return os.environ.get("KEEPSTEP_RENDEZVOUS_ID", "keepstep")


class _Alone(RendezvousHandler):
    """The meeting of one node: there is nobody to wait for. torch's own for several waits up to 0.3 s all the same.

    Each attempt has a new store, which is here before its workers are: none has to try again until rank 0 has made it.
    """

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "alone"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
        where = RendezvousStoreInfo("127.0.0.1", self._store.port)
        return RendezvousInfo(self._store, rank=0, world_size=1, bootstrap_store_info=where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return _run_id()

    def shutdown(self) -> bool:
        return True
