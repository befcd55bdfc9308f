"""`keepstep predict`: finds out what is left to do, has it done, and says how it went."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import xxhash

from keepstep.checkpoint.export import choose_step
from keepstep.checkpoint.store import Store
from keepstep.config import LaunchConfig
from keepstep.errors import CheckpointError, ConfigError
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.predict.agreement import Agreement, pack
from keepstep.predict.columns import chosen_columns
from keepstep.predict.output import RECORD, Output, finished_parts, is_part, open_output
from keepstep.predict.place import Place, absolute
from keepstep.predict.progress import Progress
from keepstep.predict.record import Record
from keepstep.predict.request import Request, Task
from keepstep.predict.source import Piece, Source, find_source
from keepstep.show import existing_run

_SMALL_ROWS = 4096
"""What is predicted here sooner than a Ray is started."""


def predict(request: Request) -> int:
    """Predicts what is left; returns the exit code."""
    Target(request.script).check()
    folder = existing_run(request.storage, request.name)
    _check_apart(request)
    source = find_source(Place.open(request.data))
    output = open_output(request.output)
    with output.held():
        return _Prediction(request, folder, source, output).run()


class _Prediction:
    """One start of the command."""

    def __init__(self, request: Request, folder: RunFolder, source: Source, output: Output) -> None:
        self._request, self._folder, self._source, self._output = request, folder, source, output
        self._store = folder.store_to_read()

    def run(self) -> int:
        begun = self._begun()
        step = self._step(begun)
        record = self._record(step, begun)
        if begun is not None:
            begun.check_same(record, self._output.address)
        schemas = finished_parts(self._output, self._source.pieces)
        left = [piece for piece in self._source.pieces if piece.number not in schemas]
        record = begun or record
        if not left:
            return self._already_finished(record)
        self._check_there(step)
        self._output.write_record(replace(record, finished=False).to_json())
        agreement = Agreement(next((pack(schema) for schema in schemas.values()), None))
        progress = Progress(self._source.rows - sum(piece.rows for piece in left), self._source.rows)
        if progress.done:
            self._say(f"{progress.done:,} of {progress.total:,} rows are there; going on with step {step}")
        try:
            self._predict(left, step, agreement, progress)
        finally:
            progress.clear()
        self._output.write_record(replace(record, finished=True).to_json())
        parts, now = len(self._source.pieces), progress.done - progress.before
        print(
            f"{self._output.address}: {progress.total:,} rows predicted with step {step} of {self._request.name}, in "
            f"{parts} part{'s' if parts > 1 else ''} "
            f"({now:,} rows in {progress.seconds:.1f} s, {progress.rate:,.0f} rows/s)"
        )
        return 0

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _begun(self) -> Record | None:
        """What an earlier start noted; None where it made no part: a script that failed at once may be mended."""
        text, names = self._output.read_record(), self._output.names()
        if text is None and names:
            raise ConfigError(
                f"{self._output.address} is not empty (it has {sorted(names)[0]}), and no prediction was begun there; "
                "give another --output"
            )
        begun = Record.from_json(text, f"{self._output.address}/{RECORD}") if text is not None else None
        return begun if any(map(is_part, names)) else None

    def _step(self, begun: Record | None) -> int:
        """The same command means the same checkpoint, also if the run has newer ones by now."""
        if begun is not None and begun.asked == self._request.checkpoint:
            return begun.step
        return choose_step(self._store, self._request.checkpoint)

    def _check_there(self, step: int) -> None:
        if step not in self._store.steps():
            raise CheckpointError(
                f"{self._output.address} was begun with step {step}, which the run has deleted since; give another "
                "--output (--keep says how many checkpoints a run keeps)"
            )

    def _record(self, step: int, begun: Record | None) -> Record:
        request, source = self._request, self._source
        # Of a checkpoint that is gone the record is all that is known: it matters only where something is left to do.
        weights = _digest(self._store, step) if step in self._store.steps() else begun.weights if begun else ""
        return Record(
            run=request.name,
            asked=request.checkpoint,
            step=step,
            weights=weights,
            model=request.model,
            script=request.script,
            script_digest=_digest_of_file(request.script),
            data=request.data,
            data_digest=source.digest,
            num_files=source.num_files,
            rows=source.rows,
            parts=len(source.pieces),
            keep=list(chosen_columns(source.schema, request.keep)),
        )

    def _already_finished(self, record: Record) -> int:
        if not record.finished:  # killed between the last part and the note
            self._output.write_record(replace(record, finished=True).to_json())
        newer = [step for step in self._store.steps() if step > record.step]
        note = f"; the run has step {newer[-1]} by now, which another --output would take" if newer else ""
        asked = f"step {record.step} of {record.run}"
        print(f"{self._output.address}: finished before, {record.rows:,} rows, {asked}{note}")
        return 0

    # -- doing it -----------------------------------------------------------------------------------------------------

    def _predict(self, left: list[Piece], step: int, agreement: Agreement, progress: Progress) -> None:
        request, task = self._request, self._task(step)
        if self._is_for_ray(left):
            from keepstep.predict.on_ray import predict_on_ray

            launch = LaunchConfig(workers=request.workers, engine="ray", address=request.address)
            predict_on_ray(task, left, agreement, launch, self._folder, progress)
            return
        from keepstep.predict.predictor import Predictor

        predictor = Predictor(task, agreement.agree)
        progress.begin()
        for piece in left:
            predictor.run(piece, progress.add)

    def _is_for_ray(self, left: list[Piece]) -> bool:
        request = self._request
        has_ray = importlib.util.find_spec("ray") is not None
        if request.address is not None:
            if not has_ray:
                raise ConfigError(f"--address {request.address} needs Ray: pip install 'keepstep[ray]'")
            return True
        if request.workers == 1:
            return False
        if len(left) == 1 or sum(piece.rows for piece in left) <= _SMALL_ROWS:
            self._say("so few rows that they are predicted in this process")
            return False
        if not has_ray:
            self._say(
                f"--workers {request.workers} needs Ray (pip install 'keepstep[ray]'): this process does it alone"
            )
        return has_ray

    def _task(self, step: int) -> Task:
        request = self._request
        return Task(
            data=absolute(request.data),
            output=self._output.address,
            script=request.script,
            storage=self._folder.storage,
            name=request.name,
            step=step,
            model=request.model,
            device=request.device,
            batch_size=request.batch_size,
            keep=chosen_columns(self._source.schema, request.keep),
        )

    def _say(self, text: str) -> None:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)


def _check_apart(request: Request) -> None:
    """Raises if the output would be read as data by the next start."""
    data, output = (_resolved(absolute(address)) for address in (request.data, request.output))
    if f"{output}/".startswith(f"{data}/"):
        raise ConfigError(f"--output {request.output} lies in --data {request.data}; give a folder beside it")


def _resolved(address: str) -> str:
    return address if "://" in address else str(Path(address).resolve())


def _digest(store: Store, step: int) -> str:
    """Of what the checkpoint's files hold, after they were found to hold it."""
    store.check(step)
    files = store.read_manifest(step).files
    return xxhash.xxh3_128(repr(sorted((name, record.xxh3) for name, record in files.items())).encode()).hexdigest()


def _digest_of_file(path: str) -> str:
    try:
        return xxhash.xxh3_128(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
