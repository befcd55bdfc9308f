"""What watching costs: heartbeat, ledger, vitals and the supervisor's monitor, against the same run without them.

    python benchmarks/watching.py            # about 6 minutes on 2 cores

Two gloo workers train a small model in 5 ms steps, watched as every run is in one block of steps and not at all in the
next: the same processes in the same memory, which between two processes alone makes a difference of a percent. torch's
flight recorder, which cannot be switched off in between, is measured beside it by bare all-reduces in two pairs of
processes, one with it and one without, and what it takes a step is added.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import RESULTS, Spread, compare, paired, print_table, write_json
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from keepstep.folder import RunFolder

STEP_S = 5e-3
BLOCK_STEPS = 200
BLOCK_CALLS = 2000
WORKERS = 2
CALLS_A_STEP = 3
"""At most: DDP's first bucket has 1 MB, the others 25."""
NAME = "watching"
TARGET = 1.005


def switchable(is_on: list[bool]) -> None:
    """Makes runs of this process watched or not, as `is_on` says at the moment."""
    from keepstep import exchange
    from keepstep import run as run_module

    class Heart(run_module.Heart):
        def enter(self, phase: int) -> None:
            if is_on[0]:
                super().enter(phase)

        def beat(self, step: int) -> None:
            if is_on[0]:
                super().beat(step)

    class Examination(exchange.Examination):
        def step_ended(self) -> None:
            if is_on[0]:
                super().step_ended()

        def to_compare(self, step_s: float) -> list[float]:
            return super().to_compare(step_s) if is_on[0] else []

        def note(self, compared: list[list[float]]) -> None:
            if is_on[0]:
                super().note(compared)

    run_module.Heart, exchange.Examination = Heart, Examination  # type: ignore[misc]


def train(width: int, storage: str) -> Iterator[None]:
    import keepstep

    run = keepstep.start(storage=storage, checkpoint_every="10h", device="cpu")
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    data = TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    for _ in run.epochs(10**6):
        for x, y in run.steps(loader):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            yield


def join(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORKERS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORKERS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


def work(rank: int, port: int, width: int, folder: str, orders: Connection) -> None:
    """Makes a block of steps, watched or not as it is told, and says how long they took."""
    from keepstep.job import JOB, Job

    join(rank, port)
    os.environ[JOB] = Job({}, NAME, folder, in_process=False).to_json()
    is_on = [True]
    switchable(is_on)
    steps = train(width, f"{folder}/runs")
    while (order := orders.recv()) is not None:
        is_on[0] = order
        began = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            next(steps)
        orders.send(time.perf_counter() - began)
    os._exit(0)


def call(rank: int, port: int, recorded: bool, orders: Connection) -> None:
    """Makes a block of all-reduces, and says how long they took."""
    from keepstep.observe.arrivals import remember_arrivals

    join(rank, port)
    if recorded:
        remember_arrivals()
    else:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.init_process_group("gloo")
    tensor = torch.zeros(1)
    while orders.recv() is not None:
        began = time.perf_counter()
        for _ in range(BLOCK_CALLS):
            dist.all_reduce(tensor)
        orders.send(time.perf_counter() - began)
    os._exit(0)


class Group:
    """Workers that do `work`, a block at a time."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(WORKERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, port, *arguments, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def block(self, order: bool = True) -> float:
        """Seconds: the slowest worker's."""
        for pipe in self._pipes:
            pipe.send(order)
        return max(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def calibrated_width() -> int:
    """With which a forward and backward on one thread take about STEP_S."""
    torch.set_num_threads(1)
    width = 128
    while width < 8192:
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        x = torch.randn(32, 64)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            model(x).sum().backward()
            times.append(time.perf_counter() - began)
        if min(times) > 0.35 * STEP_S:  # the optimizer and the exchange come on top
            return width
        width = int(1.25 * width)
    return width


class Watch:
    """What a supervisor does meanwhile."""

    def __init__(self, hearts: Path) -> None:
        from keepstep.observe.monitor import Monitor

        self.is_on, self._is_over = True, threading.Event()
        self._monitor = Monitor(hearts, 60.0, lambda *_: None)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            if self.is_on:
                self._monitor.look([])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def measure_steps(num_pairs: int, width: int) -> list[tuple[float, float]]:
    """Seconds a step: not watched, watched."""
    with tempfile.TemporaryDirectory(prefix="keepstep-watching-") as folder:
        RunFolder(Path(folder) / "runs", NAME).create()  # which a supervisor does
        workers, watch = Group(work, width, folder), Watch(Path(folder))

        def steps(watched: bool) -> float:
            watch.is_on = watched
            return workers.block(watched) / BLOCK_STEPS

        steps(True), steps(False)
        pairs = paired(lambda: steps(False), lambda: steps(True), num_pairs)
        watch.close()
        workers.close()
    return pairs


def measure_calls(num_pairs: int) -> list[tuple[float, float]]:
    """Seconds an all-reduce: without the flight recorder, with it."""
    plain, recorded = Group(call, False), Group(call, True)
    plain.block(), recorded.block()
    pairs = paired(lambda: plain.block() / BLOCK_CALLS, lambda: recorded.block() / BLOCK_CALLS, num_pairs)
    plain.close()
    recorded.close()
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{date.today()}-cpu-watching.json")
    flags = parser.parse_args()
    width = calibrated_width()
    calls = compare("flight recorder, an all-reduce", ("without", "with"), measure_calls(flags.pairs // 4), None)
    recording_s = max(0.0, calls.seconds["with"].median - calls.seconds["without"].median)
    pairs = [(plain, watched + CALLS_A_STEP * recording_s) for plain, watched in measure_steps(flags.pairs, width)]
    row = compare("health and ledger", ("not watched", "watched"), pairs, TARGET)
    row.notes["extra per step"] = Spread.of([(b - a) * 1e6 for a, b in pairs]).show(" us", 1)
    row.notes["of it the flight recorder"] = f"{CALLS_A_STEP * recording_s * 1e6:.1f} us"
    row.notes["ratio of the totals"] = round(sum(b for _, b in pairs) / sum(a for a, _ in pairs), 4)
    row.notes["width"] = width
    print_table([row, calls])
    write_json(flags.output, [row, calls], {"pairs": flags.pairs, "block_steps": BLOCK_STEPS, "workers": WORKERS})


if __name__ == "__main__":
    main()
