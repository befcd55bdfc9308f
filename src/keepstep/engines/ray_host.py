"""What runs in the process that Ray Train places for a worker: it starts the worker as a process of its own.

A worker that dies on a node that lives is so started again in place, in the time of an interpreter; Ray, which needs
many times that to make a new group of processes, deals with nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train

from keepstep.engines.ray_coordinator import Host, Order
from keepstep.engines.ray_relay import Follower, read_mark
from keepstep.engines.reports import failure_of, log_size
from keepstep.engines.standby import Standbys
from keepstep.failure import WorkerFailure
from keepstep.folder import RunFolder
from keepstep.job import ERROR_FILE, IMPORTS, JOB, LOGS, PICKLED, RAY_ADDRESS, SUPERVISOR, TARGET, Target
from keepstep.observe.heart import Pulse, heart_record
from keepstep.observe.stacks import ask_for_stacks

_ONLY = 0
"""The standbys' number for the one worker here."""
_POLL_S = 0.05
_BEAT_S = 0.5
_TERMINATE_S = 1.0
"""How long a worker may take to leave when it is told to, before it is killed."""


def serve(config: dict[str, Any]) -> None:
    """Ray Train's training function: starts workers as the driver orders, until it orders no more."""
    coordinator, host = config["coordinator"], _myself()
    attempt = 0
    with Standbys(config["working_folder"], own_session=False) as standbys:
        while True:
            with _Worker(host, standbys) as worker:
                order: Order | None = ray.get(coordinator.offer.remote(host, _free_port(), attempt))
                if order is None:
                    return
                attempt = order.attempt
                worker.start(order)
                failure = worker.watch(coordinator, attempt)
                ray.get(coordinator.ended.remote(host, attempt, failure))


def _myself() -> Host:
    context, runtime = ray.train.get_context(), ray.get_runtime_context()
    return Host(
        uid=uuid.uuid4().hex,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        node=runtime.get_node_id(),
        address=ray.util.get_node_ip_address(),
    )


class _Worker:
    """One worker's process, which imports torch while its order is waited for; what it writes; and its standby."""

    def __init__(self, host: Host, standbys: Standbys) -> None:
        self._host, self._standbys = host, standbys
        self._scratch = Path(tempfile.mkdtemp(prefix="keepstep-worker-"))
        self._heart = self._scratch / f"rank_{host.rank}"
        self._report = self._scratch / "error.json"
        self._log, self._log_start = Path(), 0
        self._follower: Follower | None = None
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            SUPERVISOR: str(os.getpid()),
        }
        self._standby = standbys.take(_ONLY) or standbys.make(self._environment)

    def start(self, order: Order) -> None:
        job = json.loads(order.environment[JOB])
        job["hearts"] = str(self._scratch)
        folder = RunFolder(job["settings"]["storage"], job["name"])
        # Ray Train's own local ranks go by address, which nodes that are containers may share: not their disks, though.
        on_this_node = order.ranks_by_node[self._host.node]
        if read_mark(folder.path) != order.mark:
            folder.create()
            if self._host.rank == on_this_node[0]:
                folder.fetch(is_behind=True)
            if self._host.rank == 0:
                self._follower = Follower(folder.path)
        self._log = folder.logs / f"rank_{self._host.rank}.txt"
        self._log_start = log_size(self._log)
        environment = self._environment
        environment |= {**order.environment, **self._place(order, on_this_node), JOB: json.dumps(job)}
        if order.pickled is not None:
            path = self._scratch / f"target{PICKLED}"
            path.write_bytes(order.pickled)
            environment[TARGET] = Target(str(path)).to_json()
        if not self._standby.become(environment):
            self._standby = self._standbys.make(environment)
            self._standby.become(environment)  # if this one is gone, too, `watch` will see how

    def _place(self, order: Order, on_this_node: list[int]) -> dict[str, str]:
        host = self._host
        place = {
            "RANK": str(host.rank),
            "WORLD_SIZE": str(host.world_size),
            "LOCAL_RANK": str(on_this_node.index(host.rank)),
            "LOCAL_WORLD_SIZE": str(len(on_this_node)),
            "MASTER_ADDR": "127.0.0.1" if order.on_one_node else order.master.address,
            "MASTER_PORT": str(order.port),
            RAY_ADDRESS: ray.get_runtime_context().gcs_address,
            LOGS: str(self._log.parent),
            ERROR_FILE: str(self._report),
        }
        if order.on_one_node:
            place["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        return place

    def watch(self, coordinator: Any, attempt: int) -> WorkerFailure | None:
        """Until the process is gone: how it failed, or None."""
        heard, looks, beaten, process = "", 0, 0.0, self._standby.process
        word = coordinator.word.remote(attempt, heard, looks)
        alive = time.time()
        while process.poll() is None:
            alive = time.time()
            if time.monotonic() - beaten > _BEAT_S:
                self._beat(coordinator)
                self._keep_standby()
                beaten = time.monotonic()
            come, _ = ray.wait([word], timeout=_POLL_S)
            if come:
                said = ray.get(word)
                if said == "look":
                    looks += 1
                    ask_for_stacks(Pulse(self._heart))
                else:
                    heard = said
                    self._obey(heard)
                word = coordinator.word.remote(attempt, heard, looks)
        ray.get(self._beat(coordinator))
        code = process.returncode
        if code == 0:
            return None
        failure = failure_of(self._host.rank, code, str(self._report), self._log, self._log_start)
        return failure if failure.is_exception else replace(failure, moment=alive)

    def _obey(self, word: str) -> None:
        if word == "stop":
            Pulse(self._heart).ask_to_stop()
            return
        process = self._standby.process
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _keep_standby(self) -> None:
        imports = self._scratch / f"{IMPORTS}{self._host.rank}"
        if imports.exists():  # its first step is made
            self._standbys.keep(_ONLY, self._environment, imports)

    def _beat(self, coordinator: Any) -> Any:
        pieces = self._follower.pieces() if self._follower else []
        return coordinator.beat.remote(self._host, heart_record(self._heart), pieces)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._standby.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
