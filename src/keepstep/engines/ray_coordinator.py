"""Where the driver of a run on Ray and its hosts, one a worker, meet: who is there, what to start, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.engines.ray_relay import Piece
from keepstep.failure import WorkerFailure


@dataclass(frozen=True)
class Host:
    """A process that Ray placed for a worker: it starts the worker, and starts it again, as a process of its own."""

    uid: str
    rank: int
    world_size: int
    node: str
    """Ray's id of its node."""
    address: str


def ranks_by_node(hosts: dict[int, Host]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        found.setdefault(host.node, []).append(rank)
    return found


@dataclass(frozen=True)
class Order:
    """What the hosts of a group are to start."""

    attempt: int
    group: int
    environment: dict[str, str]
    pickled: bytes | None
    """The function to run, where it is one and not a script."""
    mark: str
    """What the driver has written into the run folder: a host that reads it there has the same folder."""
    master: Host
    """The host of rank 0."""
    port: int
    ranks_by_node: dict[str, list[int]]

    @property
    def on_one_node(self) -> bool:
        return len(self.ranks_by_node) == 1


@dataclass(frozen=True)
class View:
    """What the driver sees."""

    version: int
    group: int
    """How many groups of hosts there have been: Ray makes a new one when it has lost a host, or resizes."""
    hosts: dict[int, Host]
    is_complete: bool
    """Whether every host of the group is there and free."""
    attempt: int
    """The attempt that was ordered last, and the group it was ordered for."""
    attempt_group: int
    ended: dict[int, WorkerFailure | None]
    """Of that attempt: how each worker ended; None: well."""
    was_paused: bool
    """Whether its workers were told to save and leave because their hosts will be others."""
    pulses: dict[int, bytes] = field(repr=False)
    pieces: list[Piece] = field(repr=False)
    """What has come of files that the driver cannot see itself."""


class Coordinator:
    """Runs as a Ray actor beside the driver; knows nothing of Ray itself."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._version = 0
        self._group = 0
        self._hosts: dict[int, Host] = {}
        self._ports: dict[int, int] = {}
        """The free hosts of the group, and the port that each found free for a meeting."""
        self._order: Order | None = None
        self._ended: dict[int, WorkerFailure | None] = {}
        self._pulses: dict[int, bytes] = {}
        self._pieces: list[Piece] = []
        self._kill = self._stop = self._over = False
        self._looks = 0
        """How often the workers' stacks were asked for in this attempt."""
        self._pause = False
        """Whether the hosts that are there make room for others."""
        self._was_paused = False
        """Whether the attempt ordered last was ended so."""

    # -- for hosts ----------------------------------------------------------------------------------------------------

    async def offer(self, host: Host, port: int, after: int) -> Order | None:
        """A host is free: waits for an order later than attempt `after`. None: there is nothing more to do.

        Raises where the host is to make room: to Ray Train, that is a reason for a new group.
        """
        self._admit(host)
        self._ports[host.rank] = port
        await self._tell()

        def is_settled() -> bool:
            return self._over or self._pause or not self._belongs(host) or self._is_ordered(after)

        await self._until(is_settled)
        if self._over or not self._belongs(host):
            return None
        if self._pause:
            raise RuntimeError("another group of hosts will go on")
        self._ports.pop(host.rank, None)
        return self._order

    async def word(self, attempt: int, heard: str, looks: int) -> str:
        """Waits for what a host must do to its worker: `look` at its stacks, for the next time after `looks`; `stop`,
        once; or `kill`, which comes last."""

        def is_to_die() -> bool:
            return self._kill or self._over or self._latest != attempt

        def is_to_stop() -> bool:
            return (self._stop or self._pause) and heard != "stop"

        await self._until(lambda: is_to_die() or is_to_stop() or self._looks > looks)
        if is_to_die():
            return "kill"
        return "stop" if is_to_stop() else "look"

    async def beat(self, host: Host, pulse: bytes, pieces: list[Piece]) -> None:
        if self._belongs(host):
            self._pulses[host.rank] = pulse
            self._pieces += pieces

    async def ended(self, host: Host, attempt: int, failure: WorkerFailure | None) -> None:
        """A worker's process is gone. If it failed, the others must go, too: they would wait for it forever."""
        if not self._belongs(host) or attempt != self._latest:
            return
        self._ended[host.rank] = failure
        self._kill = self._kill or failure is not None
        await self._tell()

    # -- for the driver -----------------------------------------------------------------------------------------------

    async def look(self, seen: int, timeout_s: float) -> View:
        """How things are, as soon as they are no longer as in version `seen`, or after a while."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until(lambda: self._version != seen), timeout_s)
        pieces, self._pieces = self._pieces, []
        return View(
            version=self._version,
            group=self._group,
            hosts=dict(self._hosts),
            is_complete=self._is_complete,
            attempt=self._latest,
            attempt_group=self._order.group if self._order else 0,
            ended=dict(self._ended),
            was_paused=self._was_paused,
            pulses=dict(self._pulses),
            pieces=pieces,
        )

    async def begin(self, environment: dict[str, str], pickled: bytes | None, mark: str) -> bool:
        """Orders the next attempt from the group that is there. False: it went meanwhile."""
        if not self._is_complete:
            return False
        master, port, where = self._hosts[0], self._ports[0], ranks_by_node(self._hosts)
        self._order = Order(self._latest + 1, self._group, environment, pickled, mark, master, port, where)
        self._ended, self._pulses, self._kill, self._was_paused, self._looks = {}, {}, False, False, 0
        await self._tell()
        return True

    async def look_at_stacks(self) -> None:
        """Has every worker write where it is."""
        self._looks += 1
        await self._tell()

    async def abort(self) -> None:
        """Ends workers that hang."""
        self._kill = True
        await self._tell()

    async def stop(self) -> None:
        """Asks the workers to save and leave."""
        self._stop = True
        await self._tell()

    async def pause(self, timeout_s: float) -> None:
        """Has the workers save and leave, for their hosts are about to be replaced; returns when they have."""
        if not self._is_under_way:
            return
        self._pause = self._was_paused = True
        await self._tell()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until(lambda: not self._is_under_way), timeout_s)

    async def finish(self) -> None:
        """Sends everybody home."""
        self._over = True
        await self._tell()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _latest(self) -> int:
        return self._order.attempt if self._order else 0

    @property
    def _is_complete(self) -> bool:
        return bool(self._hosts) and not self._pause and len(self._ports) == next(iter(self._hosts.values())).world_size

    def _admit(self, host: Host) -> None:
        """Ray gives out every rank anew with each group: a stranger in a known place means that all are strangers."""
        known = self._hosts.get(host.rank)
        is_of_another = any(other.world_size != host.world_size for other in self._hosts.values())
        if not self._hosts or is_of_another or (known is not None and known.uid != host.uid):
            self._group += 1
            self._hosts, self._ports, self._pause = {}, {}, False
        self._hosts[host.rank] = host

    def _belongs(self, host: Host) -> bool:
        known = self._hosts.get(host.rank)
        return known is not None and known.uid == host.uid

    def _is_ordered(self, after: int) -> bool:
        return self._order is not None and self._order.group == self._group and self._order.attempt > after

    @property
    def _is_under_way(self) -> bool:
        """Whether workers of the present group run, and none has failed."""
        is_present = self._order is not None and self._order.group == self._group
        return is_present and not self._kill and len(self._ended) < len(self._hosts)

    async def _tell(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)
