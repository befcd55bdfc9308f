"""Ray actors that answer requests: one image at a time, in the client's batches, in the actor's own batches.

    python predict_actor.py --num-workers 2 --requests 1024

Lines that are there because it is distributed end with the number of their step:
[1] connect  [2] a class that loads the model once an actor  [3] a pool of actors  [4] requests
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common import arguments, cluster
from common.classifier import Classifier, make_model

Answer = tuple[int, float]
"""The class, and how sure the model is."""


class Server:  # [2]
    """Answers a request of one image or of many."""

    def __init__(self, folder: str, use_gpu: bool) -> None:  # [2]
        self._classifier = Classifier(folder, use_gpu)  # [2]

    def predict(self, pngs: list[bytes]) -> list[Answer]:  # [2]
        return _answers(self._classifier(pngs))


class BatchingServer:  # [2]
    """Answers requests of one image each, but gives the model all that have come within `wait_s`."""

    def __init__(self, folder: str, use_gpu: bool, max_size: int, wait_s: float) -> None:  # [2]
        self._classifier = Classifier(folder, use_gpu)  # [2]
        self._max_size, self._wait_s = max_size, wait_s
        self._waiting: list[tuple[bytes, asyncio.Future[Answer]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def predict(self, png: bytes) -> Answer:  # [2]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((png, future))
        if len(self._waiting) == self._max_size:
            self._answer()
        elif self._timer is None:  # the first that waits says when the batch is closed
            self._timer = loop.call_later(self._wait_s, self._answer)
        return await future

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, [], None
        try:
            answers = _answers(self._classifier([png for png, _ in batch]))
        except Exception as error:  # one bad image must not leave the others waiting for ever
            for _, future in batch:
                future.set_exception(ValueError(f"no answer for this batch of {len(batch)} images: {error}"))
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)


def _answers(found: dict[str, Any]) -> list[Answer]:
    return list(zip(found["predicted"].tolist(), found["probability"].tolist(), strict=True))


class Measured(NamedTuple):
    way: str
    answers: list[Answer]
    latencies_s: list[float]
    """Of each request, from when it was sent until its answer was here."""
    seconds: float

    def __str__(self) -> str:
        middle, worst = 1e3 * np.percentile(self.latencies_s, [50, 95])
        speed = len(self.answers) / self.seconds
        return f"{self.way:<46} {speed:>9,.0f} {middle:>9.1f} {worst:>9.1f}"


def ask(way: str, ask_one: Callable[[Any], Any], requests: Sequence[Any], in_flight: int) -> Measured:
    """Sends all requests, `in_flight` of them at once, as so many clients would."""
    import ray

    sent: dict[Any, tuple[int, float]] = {}
    answers: list[Any] = [None] * len(requests)
    latencies, waiting, began = [], iter(enumerate(requests)), time.perf_counter()
    while True:
        for number, request in itertools.islice(waiting, in_flight - len(sent)):
            at = time.perf_counter()
            sent[ask_one(request)] = number, at  # [4]
        if not sent:
            break
        ready, _ = ray.wait(list(sent))  # [4]
        for reference in ready:
            number, at = sent.pop(reference)
            answers[number] = ray.get(reference)  # [4]
            latencies.append(time.perf_counter() - at)
    seconds = time.perf_counter() - began
    whole = [each for answer in answers for each in (answer if isinstance(answer, list) else [answer])]
    return Measured(way, whole, latencies, seconds)


def measure(args: argparse.Namespace, pngs: list[bytes]) -> list[Measured]:
    cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address, quiet=True)  # [1]
    import ray  # [1]

    room = {"num_cpus": args.cpus_per_worker / 2, "num_gpus": args.use_gpu / 2}  # [3]
    model, size = (args.output, args.use_gpu), args.batch_size
    plain = [ray.remote(**room)(Server).remote(*model) for _ in range(args.num_workers)]  # [3]
    batching = [ray.remote(**room)(BatchingServer).remote(*model, size, args.wait_ms / 1e3) for _ in plain]  # [3]
    ray.get([server.predict.remote(pngs[:1]) for server in plain])  # the model is loaded before time counts  # [3]
    ray.get([server.predict.remote(pngs[0]) for server in batching])  # [3]
    turns, batching_turns = itertools.cycle(plain), itertools.cycle(batching)  # [3]
    batches = [pngs[begin : begin + size] for begin in range(0, len(pngs), size)]
    singles, clients = [[png] for png in pngs], args.clients

    def to_plain(images: list[bytes]) -> Any:
        return next(turns).predict.remote(images)  # [4]

    def to_batching(image: bytes) -> Any:
        return next(batching_turns).predict.remote(image)  # [4]

    return [
        ask("one image a request, one client", to_plain, singles, 1),
        ask(f"one image a request, {clients} clients", to_plain, singles, clients),
        ask(f"one image a request, {clients} clients, actor batches", to_batching, pngs, clients),
        ask(f"{size} images a request, {2 * len(plain)} clients", to_plain, batches, 2 * len(plain)),
    ]


def read_images(folder: Path, num: int) -> pa.Table:
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        sys.exit(f"{folder} holds no Parquet files: python make_images.py")
    return pa.concat_tables([pq.read_table(path) for path in paths]).slice(0, num)


def parse() -> argparse.Namespace:
    made = arguments.parser(__doc__, task="resnet")
    cluster.add_arguments(made)
    made.add_argument("--requests", type=int, default=1024, help="images to ask for (default: %(default)s)")
    made.add_argument("--clients", type=int, default=64, help="requests under way at once (default: %(default)s)")
    made.add_argument("--wait-ms", type=float, default=5.0, help="how long a batch is kept open (default: %(default)s)")
    made.set_defaults(batch_size=64)
    args = arguments.parse(made)
    if min(args.requests, args.clients) < 1 or args.wait_ms < 0:
        made.error("--requests and --clients must be at least 1, --wait-ms at least 0")
    return args


def main() -> None:
    args = parse()
    make_model(args.output)  # says here, and not in an actor, that nothing is trained yet
    table = read_images(Path(args.output) / "images", args.requests)
    measured = measure(args, table["image"].to_pylist())
    title = f"{len(table):,} images, {args.num_workers} actors"
    print(f"{title:<46} {'images/s':>9} {'p50 ms':>9} {'p95 ms':>9}")
    print(*measured, sep="\n")
    for each in measured[1:]:
        if [kind for kind, _ in each.answers] != [kind for kind, _ in measured[0].answers]:
            sys.exit(f"{each.way}: other answers than {measured[0].way}")
    predicted, probability = zip(*measured[2].answers, strict=True)
    folder = Path(args.output) / "predictions" / "actor"
    folder.mkdir(parents=True, exist_ok=True)
    found = {"predicted": predicted, "probability": np.array(probability, np.float32)}
    pq.write_table(pa.table({"id": table["id"], "label": table["label"], **found}), folder / "part.parquet")
    print("all ways gave the same answers")


if __name__ == "__main__":
    main()
