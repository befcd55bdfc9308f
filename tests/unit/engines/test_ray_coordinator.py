"""The meeting place of driver and hosts on Ray, without Ray: orders, ends, stops, and groups that are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from keepstep.engines.ray_coordinator import Coordinator, Host, Order
from keepstep.failure import WorkerFailure

SOON_S = 2.0


def host(rank: int, world_size: int = 2, uid: str = "", node: str = "n") -> Host:
    return Host(uid or f"host{rank}", rank, world_size, node, "10.0.0.1")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


async def started(coordinator: Coordinator, *hosts: Host, after: int = 0) -> list[Order | None]:
    """The hosts offer themselves, the driver begins; what each was ordered."""
    offers = [asyncio.create_task(coordinator.offer(one, 5000 + one.rank, after)) for one in hosts]
    while not (await coordinator.look(-1, 0)).is_complete:
        await asyncio.sleep(0.01)
    assert await coordinator.begin({"KEEPSTEP_JOB": "{}"}, None, "n")
    return await asyncio.gather(*offers)


async def is_waiting(awaitable: Coroutine[Any, Any, Any]) -> bool:
    try:
        await asyncio.wait_for(awaitable, 0.05)
    except TimeoutError:
        return True
    return False


def test_hosts_get_one_order_when_all_are_there() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        assert not await coordinator.begin({}, None, "n"), "nobody is there"
        orders = await started(coordinator, host(1), host(0))
        assert orders[0] == orders[1]
        assert orders[0] is not None
        assert (orders[0].attempt, orders[0].master.rank, orders[0].port, orders[0].on_one_node) == (1, 0, 5000, True)

    run(scenario())


def test_a_failure_ends_the_others_and_the_next_attempt_has_a_new_port() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        await started(coordinator, host(0), host(1))
        assert await is_waiting(coordinator.word(1, "", 0))
        await coordinator.ended(host(1), 1, WorkerFailure(1, "SIGKILL"))
        assert await coordinator.word(1, "", 0) == "kill"
        view = await coordinator.look(-1, 0)
        assert view.ended == {1: WorkerFailure(1, "SIGKILL")} and not view.is_complete
        await coordinator.ended(host(0), 1, WorkerFailure(0, "SIGTERM"))
        orders = await started(coordinator, host(0), host(1), after=1)
        assert {order.attempt for order in orders if order} == {2}
        assert (await coordinator.look(-1, 0)).ended == {}
        assert await is_waiting(coordinator.word(2, "", 0)), "the kill was for the attempt before"

    run(scenario())


def test_what_a_host_of_an_old_group_says_is_not_heard() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        await started(coordinator, host(0), host(1))
        offer = asyncio.create_task(coordinator.offer(host(1, uid="new1"), 6001, 0))
        await asyncio.sleep(0.01)
        view = await coordinator.look(-1, 0)
        assert (view.group, view.attempt_group, list(view.hosts)) == (2, 1, [1])
        await coordinator.ended(host(0), 1, None)
        await coordinator.beat(host(0), b"x", [])
        view = await coordinator.look(-1, 0)
        assert view.ended == {} and view.pulses == {}
        other = asyncio.create_task(coordinator.offer(host(0, uid="new0"), 6000, 0))
        await asyncio.sleep(0.01)
        assert await coordinator.begin({}, None, "n")
        orders = await asyncio.gather(offer, other)
        assert orders[0] is not None and (orders[0].attempt, orders[0].group, orders[0].port) == (2, 2, 6000)

    run(scenario())


def test_a_group_of_another_size_replaces_one() -> None:
    async def scenario() -> None:
        coordinator, size = Coordinator(), 3
        await started(coordinator, host(0), host(1))
        orders = await started(coordinator, *(host(rank, size, f"new{rank}", f"n{rank}") for rank in range(size)))
        assert orders[0] is not None and orders[0].group == 2 and not orders[0].on_one_node
        assert orders[0].ranks_by_node == {"n0": [0], "n1": [1], "n2": [2]}

    run(scenario())


def test_a_stop_is_passed_on_once_and_a_kill_after_it() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        await started(coordinator, host(0), host(1))
        await coordinator.stop()
        await coordinator.look_at_stacks()
        assert await coordinator.word(1, "", 0) == "stop", "which comes before a look"
        assert await coordinator.word(1, "stop", 0) == "look"
        assert await is_waiting(coordinator.word(1, "stop", 1))
        await coordinator.ended(host(0), 1, WorkerFailure(0, "SIGKILL"))
        assert await coordinator.word(1, "stop", 1) == "kill"

    run(scenario())


def test_a_paused_group_saves_leaves_and_makes_room() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        await coordinator.pause(SOON_S)  # nobody is there: nothing to wait for
        await started(coordinator, host(0, 1))
        pause = asyncio.create_task(coordinator.pause(SOON_S))
        assert await coordinator.word(1, "", 0) == "stop"
        assert not pause.done()
        await coordinator.ended(host(0, 1), 1, None)
        await pause
        with pytest.raises(RuntimeError, match="another group"):
            await coordinator.offer(host(0, 1), 5000, 1)
        view = await coordinator.look(-1, 0)
        assert view.was_paused and not view.is_complete
        assert not await coordinator.begin({}, None, "n")
        orders = await started(coordinator, host(0, 2, "new0"), host(1, 2, "new1"))
        assert orders[0] is not None and orders[0].attempt == 2
        assert not (await coordinator.look(-1, 0)).was_paused

    run(scenario())


def test_everybody_goes_home() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        offers = [asyncio.create_task(coordinator.offer(host(rank), 1, 0)) for rank in range(2)]
        await asyncio.sleep(0.01)
        await coordinator.finish()
        assert await asyncio.gather(*offers) == [None, None]

    run(scenario())


@pytest.mark.parametrize("changes", [True, False])
def test_the_driver_need_not_ask_again_and_again(changes: bool) -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        version = (await coordinator.look(-1, 0)).version
        look = asyncio.create_task(coordinator.look(version, SOON_S if changes else 0.05))
        await asyncio.sleep(0.01)
        if changes:
            await coordinator.stop()
        assert ((await look).version != version) is changes

    run(scenario())
