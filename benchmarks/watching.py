"""What watching costs: heartbeat, ledger, vitals and the supervisor's monitor, against the same run without them.

    python benchmarks/watching.py            # about 4 minutes on 2 cores

Two pairs of gloo workers train the same small model in 5 ms steps. One pair is watched as every run is, the other not
at all; blocks of steps alternate between them, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Spread, compare, paired, print_table, write_json
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from keepstep.folder import RunFolder

STEP_S = 5e-3
BLOCK_STEPS = 100
WORKERS = 2
TARGET = 1.005


class _NoHeart:
    """What a run has for a heart when nobody watches."""

    phase = 0
    asked_to_stop = False

    def __init__(self, *_: Any) -> None: ...

    def enter(self, phase: int) -> None: ...

    def beat(self, step: int) -> None: ...


class _NoExamination:
    def __init__(self, *_: Any) -> None: ...

    def to_compare(self) -> list[float]:
        return []

    def note(self, compared: Any) -> None: ...


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


def work(rank: int, port: int, watched: bool, width: int, folder: str, orders: Connection) -> None:
    """A worker: makes as many steps as it is told, and says how long they took."""
    from keepstep import exchange
    from keepstep import run as run_module
    from keepstep.job import JOB, Job

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORKERS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORKERS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    os.environ[JOB] = Job({}, f"watched-{watched}", folder, in_process=False).to_json()
    if not watched:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
        run_module.Heart, exchange.Examination = _NoHeart, _NoExamination  # type: ignore[misc,assignment]
    steps = train(width, f"{folder}/runs")
    while (count := orders.recv()) is not None:
        began = time.perf_counter()
        for _ in range(count):
            next(steps)
        orders.send(time.perf_counter() - began)
    os._exit(0)


class Group:
    """The workers of one contender."""

    def __init__(self, watched: bool, width: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        RunFolder(folder / "runs", f"watched-{watched}").create()  # which a supervisor does
        self._pipes, self._processes = [], []
        for rank in range(WORKERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, port, watched, width, str(folder), theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        self.advance(2 * BLOCK_STEPS)

    def advance(self, count: int = BLOCK_STEPS) -> float:
        """Seconds a step: the slowest worker's."""
        for pipe in self._pipes:
            pipe.send(count)
        return max(pipe.recv() for pipe in self._pipes) / count

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
        if min(times) > 0.5 * STEP_S:  # the optimizer and the exchange come on top
            return width
        width = int(1.25 * width)
    return width


def watch(hearts: Path, is_over: threading.Event) -> None:
    """What a supervisor does meanwhile."""
    from keepstep.observe.monitor import Monitor

    monitor = Monitor(hearts, 60.0, lambda *_: None)
    while not is_over.wait(0.1):
        monitor.look([])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{date.today()}-cpu-watching.json")
    flags = parser.parse_args()
    width = calibrated_width()
    with tempfile.TemporaryDirectory(prefix="keepstep-watching-") as folder:
        plain, watched = Group(False, width, Path(folder) / "plain"), Group(True, width, Path(folder) / "watched")
        is_over = threading.Event()
        monitor = threading.Thread(target=watch, args=(Path(folder) / "watched", is_over))
        monitor.start()
        pairs = paired(plain.advance, watched.advance, flags.pairs)
        is_over.set()
        monitor.join()
        plain.close()
        watched.close()
    row = compare("health and ledger", ("not watched", "watched"), pairs, TARGET)
    row.notes["extra per step"] = Spread.of([(b - a) * 1e6 for a, b in pairs]).show(" us", 1)
    row.notes["ratio of the totals"] = round(sum(b for _, b in pairs) / sum(a for a, _ in pairs), 4)
    row.notes["width"] = width
    print_table([row])
    write_json(flags.output, [row], {"pairs": flags.pairs, "block_steps": BLOCK_STEPS, "workers": WORKERS})


if __name__ == "__main__":
    main()
