"""Connects the workers of an attempt to one Ray: the one they are in, the one named, or one that rank 0 starts."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

from keepstep import ray_connection
from keepstep.collective import Collective
from keepstep.errors import ConfigError, DataError
from keepstep.job import RAY_ADDRESS
from keepstep.seeding import preserved_cpu_rng

NAMESPACE = "keepstep"

_connected_here = False
"""Whether it is for keepstep to disconnect from Ray, and to stop the Ray that it has started."""


def import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(
            f"keepstep.RayData needs Ray, which is not here ({error}); pip install 'keepstep[ray]'"
        ) from None
    return ray


def connect(rank: int, collective: Collective) -> None:
    """Every worker is in rank 0's Ray afterwards. Collective."""
    ray = import_ray()
    if rank == 0 and not ray.is_initialized():
        _initialize(os.environ.get(RAY_ADDRESS) or os.environ.get("RAY_ADDRESS") or ray_connection.NEW)
    address = collective.from_rank0(_address() if rank == 0 else "")
    if rank and ray.is_initialized() and _address() != address:
        # The script's own ray.data call had started a Ray for this worker alone.
        ray.shutdown()
    if not ray.is_initialized():
        _initialize(address)
    _give_signals_back()


def disconnect() -> None:
    """Leaves Ray, and stops it if it was started here; does nothing for a connection that is the user's."""
    global _connected_here
    if _connected_here:
        _connected_here = False
        import_ray().shutdown()


def _address() -> str:
    return str(import_ray().get_runtime_context().gcs_address)


def _initialize(address: str) -> None:
    global _connected_here
    with preserved_cpu_rng(), warnings.catch_warnings():  # it draws ports from Python's generator
        warnings.simplefilter("ignore")
        try:
            ray_connection.connect(address, namespace=NAMESPACE)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = (
                "no Ray could be started here"
                if address == ray_connection.NEW
                else f"Ray at {address} cannot be reached"
            )
            raise DataError(
                f"{where} ({error.__cause__ or error}); start one (ray start --head) and set RAY_ADDRESS to its "
                f"address, or unset RAY_ADDRESS and {RAY_ADDRESS} to have one started"
            ) from error
    _connected_here = True


def _give_signals_back() -> None:
    """Where the script connected to Ray itself: a worker that is told to end must end, not wait for Python's turn."""
    handler = signal.getsignal(signal.SIGTERM)
    ours = threading.current_thread() is threading.main_thread()
    if ours and getattr(handler, "__module__", "").startswith("ray."):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
