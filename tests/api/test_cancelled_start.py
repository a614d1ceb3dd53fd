"""A request that is given up while the engine has not taken it yet: by its client, or by whoever runs its task."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from foliolm.api.service import SOON_S, Answer, Service


def started(receive):
    """The task of a start that the engine never answers."""

    async def start():
        await asyncio.Event().wait()

    service = object.__new__(Service)
    answer = Answer("cmpl-x", 0, "m", receive=receive)
    return asyncio.create_task(service._started(SimpleNamespace(start=start), answer))


def test_a_cancelled_task_is_cancelled_and_not_told_that_its_client_left():
    async def run():
        task = started(asyncio.Event().wait)
        await asyncio.sleep(2 * SOON_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_client_that_leaves_is_one_that_left():
    async def leaves():
        return {"type": "http.disconnect"}

    async def run():
        with pytest.raises(ClientDisconnect):
            await started(leaves)

    asyncio.run(run())
