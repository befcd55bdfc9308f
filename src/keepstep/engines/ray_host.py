"""What runs in the process that Ray Train places for a worker: it starts the worker as a process of its own.

A worker that dies on a node that lives is so started again in place, in the time of an interpreter; Ray, which needs
many times that to make a new group of processes, deals with nodes.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any

import ray
import ray.train

from keepstep.engines.ray_coordinator import Host, Order
from keepstep.engines.ray_relay import Follower, read_mark
from keepstep.engines.reports import failure_of, log_size
from keepstep.failure import WorkerFailure
from keepstep.folder import RunFolder
from keepstep.job import ERROR_FILE, JOB, LOGS, PICKLED, RAY_ADDRESS, SUPERVISOR, TARGET, Target
from keepstep.observe.heart import Pulse, heart_record
from keepstep.observe.stacks import ask_for_stacks

_POLL_S = 0.05
_BEAT_S = 0.5
_TERMINATE_S = 1.0
"""How long a worker may take to leave when it is told to, before it is killed."""


def serve(config: dict[str, Any]) -> None:
    """Ray Train's training function: starts workers as the driver orders, until it orders no more."""
    coordinator, host = config["coordinator"], _myself()
    attempt = 0
    while True:
        with _Worker(host, config["working_folder"]) as worker:
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
    """One worker's process, which imports torch while its order is waited for; and what it writes."""

    def __init__(self, host: Host, working_folder: str | None) -> None:
        self._host = host
        self._scratch = Path(tempfile.mkdtemp(prefix="keepstep-worker-"))
        self._heart = self._scratch / f"rank_{host.rank}"
        self._report = self._scratch / "error.json"
        self._log, self._log_start = Path(), 0
        self._follower: Follower | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from keepstep.worker import main_when_told; main_when_told()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            cwd=working_folder,
            stdin=subprocess.PIPE,
            text=True,
        )

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
        environment = {**order.environment, **self._place(order, on_this_node), JOB: json.dumps(job)}
        if order.pickled is not None:
            path = self._scratch / f"target{PICKLED}"
            path.write_bytes(order.pickled)
            environment[TARGET] = Target(str(path)).to_json()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already: `watch` will see how
            self._process.stdin.write(json.dumps(environment) + "\n")
            self._process.stdin.close()

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
            SUPERVISOR: str(os.getpid()),
            LOGS: str(self._log.parent),
            ERROR_FILE: str(self._report),
        }
        if order.on_one_node:
            place["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        return place

    def watch(self, coordinator: Any, attempt: int) -> WorkerFailure | None:
        """Until the process is gone: how it failed, or None."""
        heard, looks, beaten = "", 0, 0.0
        word = coordinator.word.remote(attempt, heard, looks)
        while self._process.poll() is None:
            if time.monotonic() - beaten > _BEAT_S:
                self._beat(coordinator)
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
        code = self._process.returncode
        if code == 0:
            return None
        return failure_of(self._host.rank, code, str(self._report), self._log, self._log_start)

    def _obey(self, word: str) -> None:
        if word == "stop":
            Pulse(self._heart).ask_to_stop()
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _beat(self, coordinator: Any) -> Any:
        pieces = self._follower.pieces() if self._follower else []
        return coordinator.beat.remote(self._host, heart_record(self._heart), pieces)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
