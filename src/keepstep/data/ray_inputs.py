"""A Ray data set's input blocks: counted, put in another order, and read a few at a time, without reading the rest.

This is the one file that looks inside Ray Data. Ray can run a data set from its beginning only; but a data set is a
plan whose leaf lists inputs (files, read tasks, blocks in memory), and a plan over some of them is a data set too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ray.data import Dataset, Datasource
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import (
    InputData,
    Limit,
    ListFiles,
    RandomizeBlocks,
    RandomShuffle,
    Read,
)
from ray.data._internal.logical.operators.from_operators import AbstractFrom
from ray.data._internal.logical.operators.one_to_one_operator import AbstractOneToOne
from ray.data._internal.logical.optimizers import LogicalOptimizer
from ray.data._internal.stats import DatasetStats
from ray.data._internal.util import _autodetect_parallelism

from keepstep.data.ray_windows import Piece
from keepstep.errors import DataError

_ANY_CLUSTER_CPUS = 1
"""Ray would cut a read into more tasks on a larger cluster, and the order of rows would depend on where they are."""


class Inputs:
    """What a data set reads, in units that can be read apart from each other."""

    def __init__(self, dataset: Dataset) -> None:
        context = dataset.context.copy()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        self._context = context
        _refuse_random(dataset._logical_plan.dag)
        # Optimised before its leaf is replaced: afterwards a selection of columns would not reach the files any more.
        self._dag = LogicalOptimizer().optimize(LogicalPlan(dataset._logical_plan.dag, context)).dag
        self._leaf = _leaf(dataset._logical_plan.dag) and _leaf(self._dag)
        self._units, self._leaf_over = self._list()
        self.num_units = len(self._units)

    def pieces(self, units: Sequence[int]) -> Iterator[Piece]:
        """The rows of these units, transformed, in order. An iterator that is dropped stops its tasks."""
        if self._is_in_memory:
            for unit in units:
                yield from _pieces(self._units[unit])
            return
        dag = self._dag
        if self._leaf is not None:
            leaf = self._leaf_over([self._units[unit] for unit in units])
            dag = self._dag._apply_transform(lambda operator: leaf if operator is self._leaf else operator)
        bundles, _, executor = self._dataset(dag)._execute_to_iterator()
        try:
            for bundle in bundles:
                yield from _pieces(bundle)
        finally:
            if executor is not None:
                executor.shutdown(force=False)

    def _list(self) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The units, and what makes a leaf of some of them."""
        leaf = self._leaf
        if isinstance(leaf, Read):
            tasks = leaf.datasource_or_legacy_reader.get_read_tasks(self._num_tasks(leaf))
            return tasks, lambda chosen: _read(leaf, chosen)
        if isinstance(leaf, ListFiles):  # a manifest says which files, or parts of them, one task reads
            return list(self._dataset(leaf).iter_internal_ref_bundles()), InputData
        if leaf is not None:
            return list(leaf.input_data), InputData
        return [None], lambda _: None

    @property
    def _is_in_memory(self) -> bool:
        """Whether the inputs are the rows themselves: then there is nothing to run, which takes longer than to read."""
        return self._dag is self._leaf and not isinstance(self._leaf, (Read, ListFiles))

    def _num_tasks(self, leaf: Read) -> int:
        source, largest = leaf.datasource_or_legacy_reader, self._context.target_max_block_size
        number, _, _ = _autodetect_parallelism(
            leaf.parallelism, largest, self._context, source, avail_cpus=_ANY_CLUSTER_CPUS
        )
        return int(number)

    def _dataset(self, dag: Any) -> Dataset:
        context = self._context.copy()
        return Dataset(LogicalPlan(dag, context), context, DatasetStats(metadata={}, parent=None))


def _pieces(bundle: Any) -> Iterator[Piece]:
    for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
        begin, end = (part.start_offset, part.end_offset) if part else (0, entry.metadata.num_rows)
        yield Piece(entry.ref, begin, end)


def _leaf(dag: Any) -> Any:
    """Where the rows come from, if each row depends on one input alone; None after a sort, a join, a limit."""
    while dag.input_dependencies:
        if not isinstance(dag, AbstractOneToOne) or isinstance(dag, Limit) or len(dag.input_dependencies) != 1:
            return None
        dag = dag.input_dependencies[0]
    return dag if isinstance(dag, (Read, ListFiles, InputData, AbstractFrom)) else None


def _refuse_random(dag: Any) -> None:
    """Raises where the same plan gives other rows, or another order, each time it is run."""
    for operator in dag.post_order_iter():
        if isinstance(operator, (RandomShuffle, RandomizeBlocks)) and operator.seed_config.seed is None:
            found = "random_shuffle()" if isinstance(operator, RandomShuffle) else "randomize_block_order()"
            raise DataError(
                f"the data set has a {found} without a seed, so it could not go on where it was; leave it out and "
                "give keepstep.RayData shuffle=True, which reads no more than it must"
            )
        if isinstance(operator, ListFiles):
            shuffles = operator.shuffle_config_factory() is not None
        else:
            shuffles = getattr(getattr(operator, "datasource", None), "_shuffle", None) is not None
        if shuffles:
            raise DataError(
                "the data set reads its files in an order that Ray draws anew each time; leave its shuffle=... out "
                "and give keepstep.RayData shuffle=True"
            )


class _Chosen(Datasource):  # type: ignore[misc]
    """Some of another source's read tasks."""

    def __init__(self, source: Any, tasks: list[Any]) -> None:
        self._source, self._tasks = source, tasks

    def get_name(self) -> str:
        return str(self._source.get_name())

    def estimate_inmemory_data_size(self) -> int | None:
        sizes = [task.metadata.size_bytes for task in self._tasks]
        return None if None in sizes else sum(sizes)

    def get_read_tasks(self, *_: Any, **__: Any) -> list[Any]:
        return self._tasks

    @property
    def supports_distributed_reads(self) -> bool:
        return bool(self._source.supports_distributed_reads)


def _read(leaf: Read, tasks: list[Any]) -> Read:
    source = _Chosen(leaf.datasource, tasks)
    return replace(leaf, datasource=source, datasource_or_legacy_reader=source, parallelism=len(tasks))
