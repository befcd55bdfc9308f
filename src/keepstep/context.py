"""What a worker is: its rank, device and process group, its settings, and the run folder it belongs to."""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from keepstep.collective import Collective
from keepstep.config import Config
from keepstep.device import choose_device, set_arithmetic
from keepstep.errors import ConfigError
from keepstep.folder import RunFolder
from keepstep.imports import note_imports
from keepstep.job import IMPORTS, Job, script_name, stamped
from keepstep.observe.arrivals import remember_arrivals
from keepstep.seeding import seed_everything
from keepstep.strategies import Setup, Strategy, make_strategy


@dataclass(frozen=True)
class Context:
    """A worker, ready to build and train a model."""

    config: Config
    job: Job | None
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    strategy: Strategy
    collective: Collective
    save_group: dist.ProcessGroup | None
    """For saving beside training: its messages must not mix with the loop's own."""
    folder: RunFolder
    nonce: str
    """Of this attempt: the same on all workers, never the same again."""
    owns_process_group: bool
    began: float
    """When the script called `keepstep.start`."""

    @classmethod
    def create(cls, settings: dict[str, Any]) -> Context:
        began = time.time()
        job = Job.from_environment()
        config = Config.from_settings({**settings, **(job.settings if job else {})})
        rank, world_size, local_rank, local_world_size = _place()
        device = choose_device(config.strategy, local_rank, local_world_size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        set_arithmetic(config.strategy)
        name = config.strategy.resolved_strategy(world_size)
        strategy = make_strategy(name, Setup(config.strategy, device, world_size, local_world_size))
        owns = _join(device, world_size, strategy.needs_process_group)
        collective = Collective(world_size, device)
        run_name = job.name if job else config.folder.name or _default_name()
        run_name, nonce = collective.from_rank0((run_name, uuid.uuid4().hex[:8]))
        # The same seed everywhere, so that every worker builds the same weights; `prepare` then gives each its own.
        seed_everything(config.folder.seed)
        return cls(
            config=config,
            job=job,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            device=device,
            strategy=strategy,
            collective=collective,
            save_group=dist.new_group(backend="gloo") if world_size > 1 else None,
            folder=RunFolder(config.folder.storage, run_name),
            nonce=nonce,
            owns_process_group=owns,
            began=began,
        )

    @property
    def heart_path(self) -> Path | None:
        return Path(self.job.hearts) / f"rank_{self.rank}" if self.job is not None else None

    @property
    def has_terminal(self) -> bool:
        """Whether this process, not a supervisor's, is the one that the user sees and sends signals to."""
        return self.job is None or self.job.in_process

    def note_imports(self) -> None:
        """For the standby that may have to take this worker's place."""
        if self.job is not None and not self.job.in_process:
            note_imports(Path(self.job.hearts) / f"{IMPORTS}{self.rank}")

    def leave(self) -> None:
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def _place() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size), as torchrun tells them; one worker where it does not."""
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError):
        found = {name: os.environ.get(name) for name in names}
        raise ConfigError(f"the environment says {found}; start workers with torchrun or keepstep run") from None
    return rank, world_size, local_rank, local_world_size


def _join(device: torch.device, world_size: int, needed_alone: bool) -> bool:
    """Joins the process group; True if it was made here."""
    if dist.is_initialized() or (world_size == 1 and not needed_alone):
        return False
    remember_arrivals()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        device_id = device if device.type == "cuda" else None
        rank = int(os.environ["RANK"])
        dist.init_process_group(backend, store=_own_store(), rank=rank, world_size=world_size, device_id=device_id)
    return True


def _own_store() -> Store:
    """This attempt's key-value store.

    A user's own torchrun keeps one store through its restarts, in which workers would find the addresses of their
    dead predecessors. On one node the number of restarts tells attempts apart.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = os.environ["RANK"] == "0" and not by_agent
    store = TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=serves, multi_tenant=True)
    if by_agent and os.environ.get("GROUP_WORLD_SIZE") == "1":
        return PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def _default_name() -> str:
    """Script and time. Under a user's own torchrun, the time it was started, so that its restarts resume."""
    import psutil

    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    process = psutil.Process(os.getppid() if under_torchrun else os.getpid())
    return stamped(script_name(sys.argv[0]), process.create_time())
