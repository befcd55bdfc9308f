"""What stages need of Ray: a connection as long as they last, room for workers, and errors in words."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path


@contextmanager
def ray_connected(address: str | None) -> Iterator[None]:
    """Connects to the Ray at `address`, or starts one that ends with this; its workers find the recipe's modules."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data

        from keepstep.ray_connection import NEW, connect, native_output_hidden
    except ImportError:
        raise ValueError(
            "Ray is not installed: pip install 'keepstep[voice]', or work in this process with --num-workers 0"
        ) from None
    address = address or os.environ.get("RAY_ADDRESS") or NEW
    is_own = not ray.is_initialized()
    try:
        if is_own:
            with native_output_hidden():
                connect(address, runtime_env={"working_dir": str(Path(__file__).parent)})
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
    except ConnectionError as error:
        raise ValueError(
            f"no Ray can be used at {address} ({str(error).splitlines()[0]}); leave --address out"
        ) from None
    finally:
        if is_own:
            ray.shutdown()


@dataclass(frozen=True)
class Workers:
    """How many, and what each has."""

    num: int
    device: str
    """cuda or cpu."""
    needs: dict[str, int]
    """As Ray Data's arguments."""

    def at_most(self, num_pieces: int) -> Workers:
        """Of so many pieces of work none is left for more workers."""
        return replace(self, num=min(self.num, num_pieces))

    def __str__(self) -> str:
        return f"{self.num} worker{'s' * (self.num > 1)} on {'GPUs' if self.device == 'cuda' else 'CPUs'}"


def workers_with_room(device: str, asked: int | None, cpus_each: int = 1, spare_cpus: int = 0) -> Workers:
    """As many as were asked for, or else as the connected Ray has room for; on CPUs some may be spared then."""
    import ray

    has = ray.cluster_resources()
    num_gpus, num_cpus = int(has.get("GPU", 0)), int(has.get("CPU", 1))
    if device == "cuda" and not num_gpus:
        raise ValueError("--device cuda: this Ray has no GPU; give --device cpu, or auto")
    if cpus_each > num_cpus:
        raise ValueError(f"--cpus-per-worker {cpus_each}: this Ray has {num_cpus}: give {num_cpus} or fewer")
    on_gpu = num_gpus > 0 and device != "cpu"
    room = min(num_cpus // cpus_each, num_gpus if on_gpu else num_cpus)
    if (asked or 0) > room:
        raise ValueError(f"--num-workers {asked}: this Ray has room for {room}: give {room} or fewer")
    num = asked or (room if on_gpu else max(1, room - spare_cpus))
    return Workers(num, "cuda" if on_gpu else "cpu", {"num_cpus": cpus_each, "num_gpus": int(on_gpu)})


@contextmanager
def ray_errors_named() -> Iterator[None]:
    """Around the results of workers, each of which is kept as it comes."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"Ray gave up ({first}); what is done is kept: the same command goes on") from error


def as_workers_find(model: str) -> str:
    """A folder by its whole path, as workers have another current folder; what is none is a name that they know."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model
