"""Failed work is undone and its error passes on, or reaches who waits for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from verl.outcomes import on_error, settle


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_an_error_of_any_kind_is_reacted_to_and_passes_on(kind):
    seen: list[BaseException] = []
    error = kind("broken")
    with pytest.raises(kind) as raised, on_error(seen.append):
        raise error
    assert seen == [error] and raised.value is error


def test_a_block_that_ends_well_is_not_undone():
    with on_error(lambda error: pytest.fail(f"undone for {error!r}")):
        pass


def test_a_cancelled_coroutine_is_undone():
    undone: list[BaseException] = []

    async def waits() -> None:
        with on_error(undone.append):
            await asyncio.get_running_loop().create_future()

    async def cancel() -> None:
        task = asyncio.ensure_future(waits())
        done, _ = await asyncio.wait([task], timeout=0)  # it has begun to wait
        assert not done
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert [type(error) for error in undone] == [asyncio.CancelledError]


def test_a_future_gets_the_result_of_the_work():
    future: Future[int] = Future()
    settle(future, lambda: 7)
    assert future.result(timeout=0) == 7


@pytest.mark.parametrize("kind", [ValueError, SystemExit, StopIteration])
def test_a_future_gets_the_error_of_the_work_as_it_is(kind):
    future: Future[None] = Future()
    error = kind("broken")

    def fails() -> None:
        raise error

    settle(future, fails)
    assert future.exception(timeout=0) is error
