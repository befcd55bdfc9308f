"""The Ray cluster of a run: found or started, looked over before anything runs, and let go of at the end."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config import LaunchConfig, flag
from keepstep.engines.ray_shipping import as_shipped, is_shipped_already, runtime_environment
from keepstep.errors import ConfigError
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.ray_connection import NEW, connect

_ADDRESS = "RAY_ADDRESS"
_SAME_EVERYWHERE = ("keepstep", "torch", "ray", "deepspeed")
"""Packages that must be of one version on all nodes, where this machine has them."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, and what it has in all."""

    id: str
    address: str
    resources: dict[str, float]

    def room_for(self, need: dict[str, float]) -> int:
        """How many workers it could hold if nothing else ran there."""
        wanted = {name: amount for name, amount in need.items() if amount > 0}
        return int(min((self.resources.get(name, 0.0) // amount for name, amount in wanted.items()), default=10**6))

    def __str__(self) -> str:
        has = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items() if name in ("CPU", "GPU"))
        others = [name for name in self.resources if name not in _BUILT_IN and ":" not in name]
        return f"{self.address} ({', '.join([has or 'no CPU', *others])})"


_BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


class Cluster:
    """A connection to Ray."""

    def __init__(self, config: LaunchConfig, device: str, storage: Path | None) -> None:
        """`storage`: the folder of the runs, where it is one."""
        self._config, self._device, self._storage = config, device, storage
        self._is_own = self._is_users = False
        self._ships = False

    @property
    def need(self) -> dict[str, float]:
        """What Ray reserves for each worker."""
        return self._need_on(self.nodes)

    def _need_on(self, nodes: list[Node]) -> dict[str, float]:
        need = self._config.resources_per_worker
        has_gpus = any(node.resources.get("GPU") for node in nodes)
        if self._config.gpus_per_worker is None and has_gpus and self._device != "cpu":
            need["GPU"] = 1.0
        return need

    def __enter__(self) -> Cluster:
        import ray

        address = self._config.address or os.environ.get(_ADDRESS)
        self._is_users = ray.is_initialized()  # in a notebook
        if self._is_users:
            return self
        _silence()
        try:
            if address is None:
                self._start()
            else:
                self._connect(address)
        except BaseException:
            ray.shutdown()
            raise
        return self

    def _start(self) -> None:
        need = self._config.resources_per_worker
        # More workers than cores is slow, and allowed, as everywhere else; more GPUs than there are is not.
        cores = max(os.cpu_count() or 1, int(self._config.max_workers * need.get("CPU", 0) + 0.999))
        self._check_room([_this_machine(cores)])  # Ray takes longer to start than a refusal should
        connect(NEW, num_cpus=cores)
        self._is_own = True

    def _connect(self, address: str) -> None:
        import ray

        if address.startswith("ray://"):
            raise ConfigError(
                f"--address {address} is Ray's client, which cannot place workers for another machine's script; start "
                "this command on a node of the cluster (ray job submit does), with --address auto"
            )
        try:
            connect(address)
            if len(self.nodes) > 1 and not is_shipped_already():
                with runtime_environment(self._config.ship, self._storage) as environment:
                    ray.shutdown()  # what is shipped is said when connecting
                    connect(address, runtime_env=environment)
                self._ships = True
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster can be used at {address} ({str(error).splitlines()[0]}); look up the address that "
                "ray start --head printed, or leave --address out, and one is started for this run"
            ) from None

    def __exit__(self, *_: object) -> None:
        import ray

        if not self._is_users:
            ray.shutdown()

    @property
    def working_folder(self) -> str | None:
        """Where workers start; None: where Ray has put what was shipped."""
        return None if self._ships or is_shipped_already() else str(Path.cwd())

    def as_shipped(self, target: Target) -> Target:
        """The target by the name that it has on the nodes."""
        return as_shipped(target) if self._ships else target

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        import ray

        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
        ]

    @property
    def here(self) -> str:
        """The id of this machine's node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    @property
    def leaving(self) -> set[str]:
        """The ids of nodes that will be taken away: of spot machines, say."""
        from ray._private import state

        return set(state.state.get_draining_nodes())

    def missing(self) -> str | None:
        """What the workers have to wait for, in words; None: Ray has found room for them."""
        import ray

        groups = ray.util.placement_group_table().values()
        if not any(group["state"] in ("PENDING", "RESCHEDULING") for group in groups):
            return None
        free, need, wanted = ray.available_resources(), self.need, self._config.min_workers
        short = [
            f"{wanted * amount:g} {name} of which {free.get(name, 0.0):g} are free"
            for name, amount in need.items()
            if wanted * amount > free.get(name, 0.0)
        ]
        return ", ".join(short) or None

    def check_nodes(self, folder: RunFolder) -> None:
        """Raises if a node has other packages, or does not see the run folder. Takes seconds."""
        if self._is_own:
            return
        with _probe(folder) as probe:
            for node, found in _survey(self.nodes, probe):
                _check_node(node, found, probe)

    def check_room(self) -> None:
        """Raises if the cluster can never hold as many workers as were asked for."""
        if not _can_grow():
            self._check_room(self.nodes)

    def _check_room(self, nodes: list[Node]) -> None:
        config, need = self._config, self._need_on(nodes)
        room = sum(node.room_for(need) for node in nodes)
        if room >= config.min_workers:
            return
        each = " + ".join(f"{amount:g} {name}" for name, amount in need.items())
        given = ("cpus_per_worker", "gpus_per_worker", "resources")
        changed = [flag(name) for name in given if getattr(config, name) != getattr(LaunchConfig(), name)]
        by_itself = need.get("GPU") and config.gpus_per_worker is None
        raise ConfigError(
            f"{config.min_workers} workers of {each} each were asked for; the cluster has room for {room}: "
            f"{'; '.join(map(str, nodes))}. Lower {', '.join(['--workers', *changed])}, "
            f"{'use --device cpu, ' if by_itself else ''}or add nodes"
        )


def _silence() -> None:
    """Ray prints what its helpers report, with pages of their logs, into the driver's output; nothing turns that off.
    What it means for the run is said by keepstep."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def _can_grow() -> bool:
    """Whether an autoscaler may add nodes: then what cannot be had now may be had later."""
    from ray._private import state

    limits = state.state.get_max_resources_from_cluster_config()
    return bool(limits)


def _this_machine(num_cpus: int) -> Node:
    """The node that a Ray started here would be, by Ray's own count."""
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    spec = ResourceAndLabelSpec(num_cpus=num_cpus)
    spec.resolve(is_head=True, node_ip_address="this machine")
    return Node("", "this machine", spec.to_resource_dict())


@dataclass(frozen=True)
class _Probe:
    """What every node must reach: an address of an object store, or a file."""

    url: str | None
    file: str | None


@contextmanager
def _probe(folder: RunFolder) -> Iterator[_Probe]:
    if folder.mirror is not None:
        yield _Probe(folder.where, None)
        return
    file = folder.path.absolute() / f".probe-{uuid.uuid4().hex[:8]}"
    file.touch()
    try:
        yield _Probe(None, str(file))
    finally:
        file.unlink(missing_ok=True)


def _survey(nodes: list[Node], probe: _Probe) -> list[tuple[Node, dict[str, Any]]]:
    """What each node has, as it sees it itself."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look_around)
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(probe)
        for node in nodes
    ]
    return list(zip(nodes, ray.get(asked, timeout=60), strict=True))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _SAME_EVERYWHERE:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _look_around(probe: _Probe) -> dict[str, Any]:
    """Runs on a node."""
    trouble = None
    if probe.url is not None:
        try:
            from keepstep.checkpoint.remote import Remote

            Remote.open(probe.url).hurried(10.0).sizes()
        except Exception as error:
            trouble = str(error)
    sees = probe.file is None or Path(probe.file).exists()
    return {"versions": _versions(), "sees_file": sees, "trouble": trouble}


def _check_node(node: Node, found: dict[str, Any], probe: _Probe) -> None:
    for package, version in _versions().items():
        there = found["versions"].get(package)
        if version is not None and there != version:
            has = f"{package} {there}" if there else f"no {package}"
            raise ConfigError(
                f"node {node.address} has {has}, this machine {version}: all must have the same; install it there, "
                "or give Ray an image that has it"
            )
    if not found["sees_file"]:
        assert probe.file is not None
        raise ConfigError(
            f"node {node.address} does not see {Path(probe.file).parent}: the run folder must be on a disk that all "
            "nodes share, or in an object store; give one with --storage, as s3://bucket/runs"
        )
    if found["trouble"]:
        raise ConfigError(f"node {node.address} cannot use --storage {probe.url}: {found['trouble']}")
