"""Connects a stage to Ray for as long as it lasts, with the recipe's modules where its workers find them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ray_connected(address: str | None) -> Iterator[None]:
    """Connects to the Ray at `address`, or starts one that ends with this; errors are ValueErrors in words."""
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
