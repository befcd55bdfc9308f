"""Predicts on a Ray cluster: Ray Data hands the pieces to actors, each with a model of its own."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepstep import errors
from keepstep.config import LaunchConfig
from keepstep.errors import KeepstepError, RunFailed
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.predict.agreement import Agreement
from keepstep.predict.predictor import Predictor
from keepstep.predict.progress import Progress
from keepstep.predict.request import Task
from keepstep.predict.source import Piece
from keepstep.ray_connection import native_output_hidden

if TYPE_CHECKING:
    from keepstep.engines.ray_cluster import Cluster

_MOST_TRIES = 3
"""How often a piece is begun before it is held to be what kills the workers; Ray itself would go on for ever."""


class Worker:
    """What one actor does. Errors travel as rows: Ray would make pages of them."""

    def __init__(self, task: Task, keeper: Any, folder: str | None) -> None:
        """`keeper`: the actor with the agreement; `folder`: where to work, None where Ray has put it."""
        self._task, self._keeper, self._folder = task, keeper, folder
        self._predictor: Predictor | None = None
        self._ready = 0.0

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        import ray

        (text,) = batch["piece"]
        piece = Piece.from_json(str(text))
        try:
            if ray.get(self._keeper.begin.remote(piece.number)) > _MOST_TRIES:
                raise RunFailed(
                    f"the worker died {_MOST_TRIES} times over rows {piece.first_row:,} to "
                    f"{piece.first_row + piece.rows - 1:,} of {piece.file}; out of memory? Ray's logs say more"
                )
            self._loaded().run(piece)
        except KeepstepError as error:
            where = f" (on node {ray.util.get_node_ip_address()})"
            return _row(kind=type(error).__name__, message=f"{error}{where}")
        return _row(piece.rows, time.monotonic() - self._ready)

    def _loaded(self) -> Predictor:
        if self._predictor is None:
            if self._folder is not None:
                os.chdir(self._folder)
            sys.path.insert(0, os.getcwd())

            def agree(schema: bytes) -> bytes:
                import ray

                agreed: bytes = ray.get(self._keeper.agree.remote(schema))
                return agreed

            self._predictor = Predictor(self._task, agree)
            self._ready = time.monotonic()
        return self._predictor


def _row(rows: int = 0, seconds: float = 0.0, kind: str = "", message: str = "") -> dict[str, list[Any]]:
    """`seconds`: since the model was loaded; `kind` and `message`: of an error."""
    return {"rows": [rows], "seconds": [seconds], "kind": [kind], "message": [message]}


def predict_on_ray(
    task: Task,
    pieces: list[Piece],
    agreement: Agreement,
    launch: LaunchConfig,
    folder: RunFolder,
    progress: Progress,
) -> None:
    """`folder`: the run's."""
    with _connected(launch, task.device, folder) as cluster:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # It lives where this process does: a node that is lost must not take it along.
        here = NodeAffinitySchedulingStrategy(cluster.here, soft=False)
        keeper = ray.remote(num_cpus=0, scheduling_strategy=here)(_Keeper).remote(agreement)
        shipped = replace(task, script=cluster.as_shipped(Target(task.script)).what)
        began = math.inf
        try:
            for row in _results(pieces, (shipped, keeper, cluster.working_folder), launch.max_workers, cluster.need):
                if row["kind"]:
                    raise getattr(errors, row["kind"], RunFailed)(row["message"])
                began = min(began, time.monotonic() - float(row["seconds"]))
                progress.begin(began)
                progress.add(int(row["rows"]))
        except (ray.exceptions.RayError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise RunFailed(f"Ray gave up ({first}); what is done is kept: the same command goes on") from error


@contextmanager
def _connected(launch: LaunchConfig, device: str, folder: RunFolder) -> Iterator[Cluster]:
    """A cluster that was looked over."""
    # Its C++ writes into our output what it finds remarkable, and that it was told not to.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    storage = None if folder.mirror is not None else folder.path.absolute().parent
    with ExitStack() as stack:
        with native_output_hidden():
            from keepstep.engines.ray_cluster import Cluster

            cluster = stack.enter_context(Cluster(launch, device, storage))
        cluster.check_room()
        if len(cluster.nodes) > 1:
            with suppress(OSError):  # a run that is only for reading: nodes that lack it will say so
                cluster.check_nodes(folder)
        yield cluster


class _Keeper:
    """The agreement, as an actor."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def agree(self, schema: bytes) -> bytes:
        return self._agreement.agree(schema)

    def begin(self, piece: int) -> int:
        return self._agreement.begin(piece)


def _results(pieces: list[Piece], arguments: tuple[Any, ...], workers: int, need: dict[str, float]) -> Any:
    """A row for each piece, as they are finished."""
    import ray.data

    _quiet()
    dataset = ray.data.from_items(
        [{"piece": piece.to_json()} for piece in pieces],
        override_num_blocks=len(pieces),  # a block is what an actor gets at once
    )
    # Two, so that an actor never waits for the next one; more would leave the others without work at the end.
    pool = ray.data.ActorPoolStrategy(size=min(workers, len(pieces)), max_tasks_in_flight_per_actor=2)
    device = {"num_gpus": need["GPU"]} if need.get("GPU") else {"num_cpus": need["CPU"]}
    return dataset.map_batches(Worker, batch_size=1, compute=pool, fn_constructor_args=arguments, **device).iter_rows()


def _quiet() -> None:
    """Of its plans and bars nothing is for the user."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
