"""Streams 2 GB through a loader with windows of 8 MB, and prints what worker and feeder needed for themselves."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import psutil
import ray
import ray.data
import torch

import keepstep
from keepstep.collective import Collective
from keepstep.data.loader import Loader
from keepstep.data.ray_cluster import NAMESPACE
from keepstep.data.ray_source import Joined

ROW_BYTES, ROWS, BATCH = 32 * 1024, 65_536, 64
MIB = 1 << 20


def data() -> Any:
    dataset = ray.data.range(ROWS, override_num_blocks=512)
    return dataset.map_batches(lambda batch: {"x": np.ones((len(batch["id"]), ROW_BYTES), np.uint8)})


def private_mib(process: psutil.Process) -> float:
    """Without the pages of Ray's object store, which are nobody's own."""
    return process.memory_full_info().uss / MIB


def main() -> None:
    device = torch.device("cpu")
    loader = keepstep.RayData(data, BATCH, shuffle=True, window_rows=256)
    joined = Joined(loader, Collective(1, device), "memory")
    batches = Loader(joined, 0, 0, 1, device).training_pass()
    first = next(batches)
    feeder = ray.get_actor("memory", NAMESPACE)
    feeder_id = ray.get(feeder.__ray_call__.remote(lambda _: os.getpid()))
    processes = {"worker": psutil.Process(), "feeder": psutil.Process(feeder_id)}
    streamed, found = first.data["x"].nbytes, {}
    for number, batch in enumerate(batches, 1):
        streamed += batch.data["x"].nbytes
        if number % 20 == 0:
            for name, process in processes.items():
                now = private_mib(process)
                early = found.setdefault(f"{name}_early_mib", now)
                if number * 10 <= ROWS // BATCH:
                    found[f"{name}_early_mib"] = max(early, now)
                found[f"{name}_most_mib"] = max(found.get(f"{name}_most_mib", 0.0), now)
    print(json.dumps({"streamed_mib": streamed / MIB, **found}))


if __name__ == "__main__":
    main()
