"""Ray data sets as loaders: the same rows in the same batches whatever the workers, and exactly once."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keepstep
from keepstep.collective import Collective
from keepstep.data.loader import Loader
from keepstep.data.prefetch import prefetched
from keepstep.data.ray_feeder import _Pass
from keepstep.data.ray_windows import Cut, Piece, Place, Window, windows
from keepstep.errors import ConfigError, DataError

ray = pytest.importorskip("ray")

from keepstep.data import ray_cluster  # noqa: E402
from keepstep.data.ray_source import Joined  # noqa: E402

pytestmark = pytest.mark.filterwarnings(r"ignore:::ray\..*")  # of Ray's about Ray
CPU = torch.device("cpu")

# -- windows: no Ray needed --------------------------------------------------------------------------------------------


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def pieces(sizes: list[int], segment: int) -> Iterator[Piece]:
    return (Piece((segment, number), 0, size) for number, size in enumerate(sizes))


def rows_of(found: list[Any], sizes: dict[int, list[int]]) -> list[tuple[int, int]]:
    """(segment, row of the segment), for every row of the windows."""
    return [
        (piece.block[0], sum(sizes[piece.block[0]][: piece.block[1]]) + row)
        for window in found
        for piece in window.pieces
        for row in range(piece.begin, piece.end)
    ]


@pytest.mark.parametrize("sizes", [{0: [5, 0, 7], 1: [], 2: [1, 1, 20]}, {0: [34]}, {0: [1] * 34}])
def test_windows_have_all_rows_in_order_and_can_begin_at_any_of_them(sizes: dict[int, list[int]]) -> None:
    def cut(start: Place) -> list[Any]:
        left = ((segment, pieces(sizes[segment], segment)) for segment in sizes if segment >= start.segment)
        return list(windows(left, start, 8))

    whole = cut(Place(0, 0))
    assert [window.num_rows for window in whole] == [8, 8, 8, 8, 2]
    assert rows_of(whole, sizes) == [(segment, row) for segment in sizes for row in range(sum(sizes[segment]))]
    for number, window in enumerate(whole):
        assert cut(window.place) == whole[number:]


def test_windows_do_not_depend_on_how_rows_lie_in_blocks() -> None:
    many, few = ({0: [1] * 20, 1: [2] * 10}, {0: [20], 1: [20]})
    found = [
        [(w.place, w.num_rows) for w in windows(((s, pieces(sizes[s], s)) for s in sizes), Place(0, 0), 8)]
        for sizes in (many, few)
    ]
    assert found[0] == found[1]


def test_segments_hold_every_unit_once_in_an_order_of_the_pass() -> None:
    cut = Cut(4, 8, True, seed=3, segment_units=8)
    passes = [np.concatenate(cut.segments(400, number)).tolist() for number in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(400))
    assert passes[0] != passes[1] != list(range(400))
    assert len(cut.segments(400, 0)) == 16 and len(cut.segments(9, 0)) == 2 and cut.segments(0, 0) == []
    assert np.concatenate(Cut(4, 8, False, 3).segments(400, 1)).tolist() == list(range(400))


def test_prefetched_runs_ahead_stops_when_left_and_raises_what_was_raised() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number
        raise KeyError("at the end")

    ahead = prefetched(numbers(), 2)
    assert next(ahead) == 0
    ahead.close()
    assert len(made) < 10
    with pytest.raises(KeyError, match="at the end"):
        list(prefetched(numbers(), 2))


def test_a_worker_that_left_holds_nobody_up_even_if_it_is_heard_late() -> None:
    made = [Window(Place(0, number), (), 1) for number in range(20)]
    under_way = _Pass(iter(made), world_size=2)
    assert under_way.window(0, rank=0) == under_way.window(0, rank=1) == made[0]
    assert not under_way.leave(rank=1)
    assert under_way.window(1, rank=1) is None
    assert [under_way.window(number, rank=0) for number in range(1, 21)] == [*made[1:], None]
    assert under_way.leave(rank=0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refuses_what_is_no_dataset_or_no_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"got a list; give it a ray\.data\.Dataset"):
        keepstep.RayData([1, 2], batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size is 0; give a whole number"):
        keepstep.RayData(lambda: None, batch_size=0)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="batch_size is None"):
        keepstep.RayData(lambda: None, batch_size=None)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="window_rows is 3; at least one batch"):
        keepstep.RayData(lambda: None, batch_size=4, window_rows=3)  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'keepstep\[ray\]'"):
        keepstep.RayData(lambda: None, batch_size=4)  # type: ignore[arg-type,return-value]


# -- with a Ray --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("KEEPSTEP_RAY_ADDRESS", ray_address)
    ray_cluster.connect(0, Collective(1, CPU))
    patch.undo()
    yield
    ray_cluster.disconnect()


class OneProcess(Collective):
    """For workers that are made one after the other, rank 0 first."""

    _said: Any = None

    def from_rank0(self, value: Any) -> Any:
        self._said = self._said or value
        return self._said


class Workers:
    """The workers of one attempt, in threads of this process."""

    _attempts = 0

    def __init__(self, world_size: int, loader: keepstep.RayData, seed: int = 7, even_calls: bool = False) -> None:
        Workers._attempts += 1
        joined = Joined(loader, OneProcess(1, CPU), f"test-{Workers._attempts}")
        self.loaders = [
            Loader(joined, seed, rank, world_size, CPU, even_calls=even_calls) for rank in range(world_size)
        ]

    def train(self, stop: int | None = None) -> list[list[int]]:
        """The ids of each global batch of a training pass, up to `stop` of them."""
        found: list[list[Any]] = [[] for _ in self.loaders]

        def work(rank: int) -> None:
            loader = self.loaders[rank]
            batches = loader.training_pass()
            for batch in batches:
                assert batch.world_size == len(self.loaders)
                found[rank].append((batch.data["id"][: batch.num_samples].tolist(), batch.num_global))
                loader.offset += 1
                if len(found[rank]) == stop:
                    break
            batches.close()  # type: ignore[attr-defined]

        _in_threads(work, len(self.loaders))
        whole = [flat([ids for ids, _ in parts]) for parts in zip(*found, strict=True)]
        assert [len(ids) for ids in whole] == [size for _, size in found[0]]
        return whole

    def close(self) -> None:
        ray.kill(ray.get_actor(f"test-{Workers._attempts}", ray_cluster.NAMESPACE))


def _in_threads(work: Any, count: int) -> None:
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def numbers(count: int, blocks: int = 24) -> Any:
    return ray.data.range(count, override_num_blocks=blocks)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small data set has several."""
    cut = keepstep.RayData.cut
    monkeypatch.setattr(keepstep.RayData, "cut", lambda loader, seed: replace(cut(loader, seed), segment_units=5))


def train(loader: keepstep.RayData, world_size: int = 1, seed: int = 7) -> list[list[int]]:
    workers = Workers(world_size, loader, seed)
    try:
        return workers.train()
    finally:
        workers.close()


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_same_batches_for_any_number_of_workers_and_each_row_once(cluster: None, short_segments: None) -> None:
    loader = keepstep.RayData(numbers(1003), batch_size=12, shuffle=True, window_rows=100)
    alone = train(loader)
    assert sorted(flat(alone)) == list(range(1003))
    assert [len(batch) for batch in alone] == [12] * 83 + [7]
    assert alone[0] != sorted(alone[0])
    for world_size in (2, 3):
        assert train(loader, world_size) == alone
    assert train(loader, seed=8) != alone


@pytest.mark.ray
def test_unshuffled_is_in_order_and_drop_last_drops(cluster: None) -> None:
    loader = keepstep.RayData(numbers(50, 5), batch_size=8, drop_last=True)
    assert train(loader) == [list(range(start, start + 8)) for start in range(0, 48, 8)]


@pytest.mark.ray
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "kind", ["filtered and multiplied", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "sorted"))]
)
def test_goes_on_at_any_batch_with_any_number_of_workers(cluster: None, short_segments: None, kind: str) -> None:
    dataset = numbers(400)
    if kind == "filtered and multiplied":
        dataset = dataset.filter(lambda row: row["id"] % 3 != 0)
        dataset = dataset.flat_map(lambda row: [{"id": row["id"] * 10 + copy} for copy in range(row["id"] % 4)])
    if kind == "sorted":  # cannot be read in part: it is run again and skipped
        dataset = dataset.sort("id", descending=True)
    loader = keepstep.RayData(dataset, batch_size=6, shuffle=True, window_rows=48)
    whole = train(loader)
    assert len(flat(whole)) == len(set(flat(whole)))
    found, state = [], None
    for world_size, stop in ((2, 3), (1, 29), (3, 8), (2, None)):
        workers = Workers(world_size, loader)
        for each in workers.loaders:
            if state is not None:
                each.load_state_dict(state)
        found += workers.train(stop)
        state = workers.loaders[-1].state_dict()
        workers.close()
    assert found == whole
    assert state is not None and state["ended"]


@pytest.mark.ray
def test_epochs_differ_and_evaluation_is_the_same_each_time(cluster: None) -> None:
    workers = Workers(1, keepstep.RayData(numbers(100), batch_size=10, shuffle=True))
    loader = workers.loaders[0]
    first, second = workers.train(), workers.train()
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(100)) and first != second
    evaluations = [[batch["id"].tolist() for batch in loader] for _ in range(2)]
    assert evaluations[0] == evaluations[1] and sorted(flat(evaluations[0])) == list(range(100))
    workers.close()


@pytest.mark.ray
def test_fewer_rows_than_workers_in_the_last_batch(cluster: None) -> None:
    for even_calls in (False, True):
        workers = Workers(3, keepstep.RayData(numbers(7, 2), batch_size=6), even_calls=even_calls)
        assert workers.train() == [[0, 1, 2, 3, 4, 5], [6]]
        seen: dict[int, list[list[int]]] = {}
        _in_threads(lambda rank: seen.update({rank: [b["id"].tolist() for b in workers.loaders[rank]]}), 3)  # noqa: B023
        last = [[[6]], [[]], [[]]] if even_calls else [[[6]], [], []]
        assert [seen[rank][1:] for rank in range(3)] == last
        workers.close()


@pytest.mark.ray
def test_a_pass_that_was_left_ends_and_the_next_one_is_whole(cluster: None) -> None:
    workers = Workers(1, keepstep.RayData(numbers(300), batch_size=4, shuffle=True, window_rows=8))
    assert len(workers.train(stop=2)) == 2
    workers.loaders[0].begin_epoch()
    assert sorted(flat(workers.train())) == list(range(300))
    workers.close()


@pytest.mark.ray
def test_batches_are_tensors_or_what_the_collate_fn_makes(cluster: None) -> None:
    dataset = numbers(20, 2).map_batches(
        lambda batch: {
            "id": batch["id"],
            "image": np.ones((len(batch["id"]), 2, 3), np.float32) * batch["id"][:, None, None].astype(np.float32),
            "text": np.array([f"row {number}" for number in batch["id"]]),
        }
    )
    workers = Workers(1, keepstep.RayData(dataset, batch_size=8))
    batch = next(iter(workers.loaders[0]))
    assert batch["image"].shape == (8, 2, 3) and batch["image"].dtype == torch.float32
    assert batch["image"][:, 1, 2].tolist() == batch["id"].tolist() == list(range(8))
    assert batch["text"].tolist() == [f"row {number}" for number in range(8)]
    batch["id"] += 1  # it is the user's own memory
    workers.close()

    def collate(columns: dict[str, Any]) -> Any:
        return torch.from_numpy(columns["id"]) + random.random() + np.random.rand() + torch.rand(())

    loader = keepstep.RayData(dataset, batch_size=8, collate_fn=collate)
    runs = []
    for _ in range(2):
        workers = Workers(1, loader)
        runs.append([batch.data for batch in workers.loaders[0].training_pass()])
        workers.close()
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.ray
def test_random_number_generators_are_left_alone(cluster: None) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    train(keepstep.RayData(numbers(100), batch_size=10, shuffle=True))
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.ray
@pytest.mark.slow
def test_what_cannot_be_resumed_or_read_is_refused(cluster: None) -> None:
    for dataset, options, message in (
        (numbers(10).filter(lambda row: False), {}, "has no rows"),
        (numbers(3, 1), {"drop_last": True}, "make no batch of 4"),
        (numbers(10).random_shuffle(), {}, r"random_shuffle\(\) without a seed"),
        (numbers(10, 2).map_batches(_other_columns), {}, "rows with differing columns"),
        (numbers(10, 2).map_batches(_other_types), {}, "the column 'x' is double in one block and int64 in another"),
    ):
        with pytest.raises(DataError, match=message):
            train(keepstep.RayData(dataset, batch_size=4, **options))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="got a int"):
        Joined(keepstep.RayData(lambda: 3, batch_size=4), Collective(1, CPU), "x").source(0, 0, 1, CPU, False)  # type: ignore[arg-type,return-value]


def _other_columns(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"]} if batch["id"][0] == 0 else {"number": batch["id"]}


def _other_types(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["id"] if batch["id"][0] == 0 else batch["id"] / 2}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 6}, "batch_size was 4 when the run was saved within an epoch, and is 6 here"),
        ({"window_rows": 64}, "window_rows was 128"),
        ({"dataset": lambda: numbers(100, 10)}, "had 20 input blocks when the run was saved and has 10 now"),
        ({"dataset": lambda: numbers(100, 20).map(lambda row: {"id": -row["id"] - 1})}, "gives other rows than when"),
    ],
)
def test_other_data_is_not_gone_on_with(cluster: None, changed: dict[str, Any], message: str) -> None:
    options = {"dataset": lambda: numbers(100, 20), "batch_size": 4, "shuffle": True}
    workers = Workers(1, keepstep.RayData(**options))
    workers.train(stop=5)
    state = workers.loaders[0].state_dict()
    workers.close()
    workers = Workers(1, keepstep.RayData(**{**options, **changed}))
    workers.loaders[0].load_state_dict(state)
    with pytest.raises(DataError, match=message):
        workers.train()
    workers.close()


@pytest.mark.ray
@pytest.mark.slow
def test_reads_parquet_files_and_blocks_in_memory(cluster: None, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(10):
        ids = range(number * 10, number * 10 + 10)
        pq.write_table(pa.table({"id": ids, "unused": [0.0] * 10}), tmp_path / f"{number}.parquet")
    files = ray.data.read_parquet(str(tmp_path), override_num_blocks=10).select_columns(["id"])
    items = ray.data.from_items([{"id": number} for number in range(100)], override_num_blocks=10)
    for dataset in (files, items, items.materialize()):
        found = train(keepstep.RayData(dataset, batch_size=10, shuffle=True, window_rows=50))
        assert sorted(flat(found)) == list(range(100)) and found[0] != list(range(10))


@pytest.mark.ray
@pytest.mark.gpu
def test_batches_are_copied_to_the_gpu_ahead_and_whole(cluster: None) -> None:
    loader = keepstep.RayData(numbers(4096, 4), batch_size=256, shuffle=True)
    on_cpu = train(loader)
    joined = Joined(loader, Collective(1, CPU), "gpu")
    batches = Loader(joined, 7, 0, 1, torch.device("cuda")).training_pass()
    found = []
    for batch in batches:
        assert batch.data["id"].is_cuda
        torch.cuda._sleep(10_000_000)  # the copy of the next one must not overtake what uses this one
        found.append(batch.data["id"].clone())
    assert [ids.tolist() for ids in found] == on_cpu
