"""What watching costs: heartbeat, ledger, vitals and the supervisor's monitor, against the same run without them.

    python benchmarks/watching.py            # about 5 minutes on 2 cores

Two gloo workers train a small model in 5 ms steps, watched as every run is in one block of steps and not at all in the
next: the same processes in the same memory, which between two processes alone makes a difference of a percent. Steps in
which workers meet, about one a second, are timed apart and what watching adds to them is spread over all steps: they
are too few for the median of the blocks to see. What is not switched off in between is added as it was measured: the
processor time of the supervisor's look at the workers, as if it were taken from a worker, and torch's flight recorder,
by bare all-reduces in a process with it and one without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from measure import RESULTS, Row, Spread, compare, paired, print_table, write_json
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from keepstep.folder import RunFolder

STEP_S = 5e-3
BLOCK_STEPS = 20
WARM_UP_STEPS = 600
BLOCK_CALLS = 2000
WORKERS = 2
CALLS_A_STEP = 2
"""DDP's buckets for this model."""
NAME = "watching"
TARGET = 1.005


@dataclass
class Switch:
    """Whether the steps of this process are watched at the moment, and whether workers met in the newest."""

    is_on: bool = True
    met: bool = False

    def install(self) -> None:
        from keepstep import exchange
        from keepstep import run as run_module

        switch = self

        class Heart(run_module.Heart):
            def enter(self, phase: int) -> None:
                if switch.is_on:
                    super().enter(phase)

            def beat(self, step: int) -> None:
                if switch.is_on:
                    super().beat(step)

        class Examination(exchange.Examination):
            def step_ended(self) -> None:
                if switch.is_on:
                    super().step_ended()

            def to_compare(self, step_s: float) -> list[float]:
                switch.met = True
                return super().to_compare(step_s) if switch.is_on else []

            def note(self, compared: list[list[float]]) -> None:
                if switch.is_on:
                    super().note(compared)

        run_module.Heart, exchange.Examination = Heart, Examination  # type: ignore[misc]


@dataclass(frozen=True)
class Step:
    """One step of a worker."""

    is_watched: bool
    met: bool
    seconds: float


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


def join(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


def work(rank: int, port: int, width: int, folder: str, num_pairs: int, answer: Connection) -> None:
    """Makes pairs of blocks, one of them watched, and says how long each step took."""
    from keepstep.job import JOB, Job

    join(rank, WORKERS, port)
    os.environ[JOB] = Job({}, NAME, folder, in_process=False).to_json()
    switch = Switch()
    switch.install()
    steps = train(width, f"{folder}/runs")
    for _ in range(WARM_UP_STEPS):
        next(steps)
    made, order = [], random.Random(0)  # the same on all workers
    for _ in range(num_pairs):
        first = order.random() < 0.5
        for is_watched in (first, not first):
            switch.is_on = is_watched
            for _ in range(BLOCK_STEPS):
                switch.met, began = False, time.perf_counter()
                next(steps)
                made.append(Step(is_watched, switch.met, time.perf_counter() - began))
    answer.send(made)
    os._exit(0)


def call(port: int, recorded: bool, orders: Connection) -> None:
    """Makes a block of all-reduces, with nobody to wait for, and says how long one took."""
    from keepstep.observe.arrivals import remember_arrivals

    join(0, 1, port)
    if recorded:
        remember_arrivals()
    else:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.init_process_group("gloo")
    tensor = torch.zeros(1)
    while orders.recv():
        began = time.perf_counter()
        for _ in range(BLOCK_CALLS):
            dist.all_reduce(tensor)
        orders.send((time.perf_counter() - began) / BLOCK_CALLS)
    os._exit(0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


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

        self.share = 0.0
        """Of a processor's time."""
        self._is_over = threading.Event()
        self._monitor = Monitor(hearts, 60.0, lambda *_: None)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        began = time.perf_counter()
        while not self._is_over.wait(0.1):
            self._monitor.look([])
        self.share = time.thread_time() / (time.perf_counter() - began)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def measure_steps(num_pairs: int, width: int) -> tuple[list[Step], float]:
    """Rank 0's steps, and the supervisor's share of a processor."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="keepstep-watching-") as folder:
        RunFolder(Path(folder) / "runs", NAME).create()  # which a supervisor does
        port, processes, pipes = free_port(), [], []
        for rank in range(WORKERS):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(rank, port, width, folder, num_pairs, theirs)))
            processes[-1].start()
            pipes.append(mine)
        watch = Watch(Path(folder))
        steps, *_ = [pipe.recv() for pipe in pipes]
        watch.close()
        for process in processes:
            process.join()
    return steps, watch.share


def measure_calls(num_pairs: int) -> Row:
    """An all-reduce with the flight recorder against one without."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for recorded in (False, True):
        pipes[recorded], theirs = context.Pipe()
        processes.append(context.Process(target=call, args=(free_port(), recorded, theirs)))
        processes[-1].start()

    def block(recorded: bool) -> float:
        pipes[recorded].send(True)
        seconds: float = pipes[recorded].recv()
        return seconds

    block(False), block(True)
    pairs = paired(lambda: block(False), lambda: block(True), num_pairs)
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    return compare("flight recorder, an all-reduce", ("without", "with"), pairs, None)


def meeting_s(steps: list[Step], is_watched: bool) -> float:
    """What a meeting takes: the mean, as not every one is alike, without the twentieth of them that was disturbed."""
    usual = statistics.median(step.seconds for step in steps if step.is_watched == is_watched and not step.met)
    met = sorted(step.seconds - usual for step in steps if step.is_watched == is_watched and step.met)
    return statistics.mean(met[: max(1, round(0.95 * len(met)))])


def block_times(steps: list[Step]) -> list[tuple[float, float]]:
    """Seconds a step of each pair of blocks, the steps with a meeting left out: not watched, watched."""
    pairs = []
    for begin in range(0, len(steps), 2 * BLOCK_STEPS):
        both = [step for step in steps[begin : begin + 2 * BLOCK_STEPS] if not step.met]
        plain, watched = ([s.seconds for s in both if s.is_watched == is_watched] for is_watched in (False, True))
        pairs.append((statistics.median(plain), statistics.median(watched)))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{date.today()}-cpu-watching.json")
    flags = parser.parse_args()
    width = calibrated_width()
    calls = measure_calls(50)
    steps, supervisor = measure_steps(flags.pairs, width)
    blocks = block_times(steps)
    usual = statistics.median(plain for plain, _ in blocks)
    every = len(steps) / sum(step.met for step in steps)
    meeting = max(0.0, meeting_s(steps, True) - meeting_s(steps, False)) / every
    recording = CALLS_A_STEP * max(0.0, calls.seconds["with"].median - calls.seconds["without"].median)
    added = meeting + recording + supervisor * usual
    row = compare(
        "health and ledger", ("not watched", "watched"), [(plain, watched + added) for plain, watched in blocks], TARGET
    )
    extra = Spread.of([1e6 * (watched - plain) for plain, watched in blocks])
    row.notes = {
        "heartbeat and ledger, a step": f"{extra.median:.1f} us, between {extra.low:.1f} and {extra.high:.1f}",
        "what workers compare, a step": f"{1e6 * meeting:.1f} us: {1e6 * meeting * every:.0f} every {every:.0f} steps",
        "flight recorder, a step": f"{1e6 * recording:.1f} us: {CALLS_A_STEP} calls",
        "supervisor, a step": f"{1e6 * supervisor * usual:.1f} us: {supervisor:.2%} of a processor",
        "width": width,
    }
    print_table([row, calls])
    write_json(flags.output, [row, calls], {"pairs": flags.pairs, "block_steps": BLOCK_STEPS, "workers": WORKERS})


if __name__ == "__main__":
    main()
