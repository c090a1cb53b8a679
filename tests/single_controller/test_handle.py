"""`LocalHandle`: calls, cancelling, time limits, threads."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

from verl.errors import WorkerError
from verl.single_controller.base import ClassWithInitArgs, Dispatch, Worker, register, worker_seed
from verl.single_controller.base.handle import called_method
from verl.single_controller.local import LocalHandle, LocalWorkerGroup


class Server:
    def __init__(self):
        self.started, self.cancelled = 0, 0
        self.begun = asyncio.Event()
        self.release = threading.Event()

    async def echo(self, name, timeout=None, method=None):
        return name, timeout, method

    async def hang(self):
        self.started += 1
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def hang_and_fail(self):
        try:
            await self.hang()
        except asyncio.CancelledError:
            raise KeyError("mine") from None

    async def fail(self):
        raise KeyError("mine")

    async def fail_by_timeout(self):
        raise TimeoutError("my own")

    def thread(self):
        return threading.current_thread()

    def block(self):
        return self.release.wait(60)

    def coroutine(self):
        return self.echo("late")

    def _private(self):
        return None


async def test_async_and_plain_methods_answer_with_any_keyword():
    handle = LocalHandle(Server())
    assert await handle.call(Server.echo, name="n", timeout=3, method="m") == ("n", 3, "m")
    assert await handle.call(Server.thread) is not threading.main_thread()
    assert await handle.call(Server.coroutine) == ("late", None, None)


async def test_plain_methods_do_not_stop_the_loop_and_keep_their_order():
    server = Server()
    handle = LocalHandle(server)
    blocked = asyncio.ensure_future(handle.call(Server.block))
    behind = asyncio.ensure_future(handle.call(Server.thread))
    assert await handle.call(Server.echo, "while it blocks") == ("while it blocks", None, None)
    assert not blocked.done() and not behind.done()
    server.release.set()
    assert await blocked is True
    await behind
    handle.close()


async def test_two_plain_calls_run_at_once_where_allowed():
    class Meeting:
        def __init__(self):
            self.barrier = threading.Barrier(2)

        def meet(self):
            return self.barrier.wait(60) >= 0

    handle = LocalHandle(Meeting(), max_concurrency=2)
    assert await asyncio.gather(handle.call(Meeting.meet), handle.call(Meeting.meet)) == [True, True]


async def test_the_objects_exception_arrives_unchanged_with_a_note():
    with pytest.raises(KeyError, match="mine") as caught:
        await LocalHandle(Server(), name="rollout[0]").call(Server.fail)
    assert caught.value.__notes__ == ["(in worker rollout[0].fail)"]
    with pytest.raises(TimeoutError, match="my own"):
        await LocalHandle(Server(), timeout=60).call(Server.fail_by_timeout)


async def test_a_call_that_takes_too_long_is_given_up_and_cancelled():
    server, seconds = Server(), 0.01
    while not server.started:  # a call that is given up before it begins is never cancelled
        seconds *= 2
        handle = LocalHandle(server, name="rollout[0]").with_timeout(seconds)
        with pytest.raises(WorkerError, match=rf"rollout\[0\].hang did not answer within {seconds:g} s"):
            await handle.call(Server.hang)
    await asyncio.sleep(0)
    assert server.cancelled == 1


async def test_cancelling_the_waiting_task_cancels_the_call():
    server = Server()
    task = asyncio.ensure_future(LocalHandle(server).call(Server.hang))
    while not server.started:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (server.started, server.cancelled) == (1, 1)


def test_the_error_of_a_call_that_was_cancelled_is_printed_nowhere():
    said = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        server = Server()
        task = asyncio.ensure_future(LocalHandle(server).call(Server.hang_and_fail))
        while not server.started:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.cancelled == 1

    asyncio.run(main())
    gc.collect()
    assert said == []


async def test_cancel_ends_the_calls_in_flight_of_one_method_from_any_thread():
    server = Server()
    handle = LocalHandle(server)
    hanging = [asyncio.ensure_future(handle.call(Server.hang)) for _ in range(2)]
    blocked = asyncio.ensure_future(handle.call(Server.block))
    while server.started < 2:
        await asyncio.sleep(0)
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(handle.cancel(Server.hang)))
    thread.start()
    results = await asyncio.gather(*hanging, return_exceptions=True)
    thread.join()
    assert counts == [2] and server.cancelled == 2 and not blocked.done()
    assert all(isinstance(r, WorkerError) and "was cancelled" in str(r) for r in results)
    server.release.set()
    assert await blocked and handle.cancel() == 0


async def test_an_unknown_or_private_method_is_refused_with_the_nearest_name():
    handle = LocalHandle(Server())
    with pytest.raises(WorkerError, match="'thread'"):
        called_method(Server(), "Server.threat", "server")  # the other process has another release
    with pytest.raises(WorkerError, match="no method '_private'"):
        await handle.call(Server._private)
    with pytest.raises(WorkerError, match=r"no object of the class Drawer.*Server"):
        await handle.call(Drawer.draw)


async def test_a_handle_takes_methods_and_cancels_by_class():
    class Other:
        async def hang(self):
            return "done"

    class Both(Worker):
        def endpoints(self):
            return {Server: server, Other: Other()}

    server = Server()
    handle = LocalHandle(Both())
    with pytest.raises(WorkerError, match=r"a handle calls methods.*Class.method"):
        await handle.call(gc.collect)
    hanging = asyncio.ensure_future(handle.call(Server.hang))
    await server.begun.wait()
    assert handle.cancel(Other.hang) == 0 and await handle.call(Other.hang) == "done"
    assert handle.cancel(Server.hang) == 1
    with pytest.raises(WorkerError, match="was cancelled"):
        await hanging


async def test_a_handle_reaches_the_objects_that_a_worker_holds_by_class():
    class Louder(Server):
        async def echo(self, name, timeout=None, method=None):
            return name.upper(), timeout, method

    class Holder(Worker):
        def endpoints(self):
            return {Server: Louder(), Drawer: Drawer()}

        def echo(self):
            return "the worker's"

    handle = LocalHandle(Holder(), name="holder[0]")
    assert await handle.call(Server.echo, "name") == ("NAME", None, None), "its override runs"
    assert await handle.call(Holder.echo) == "the worker's"
    with pytest.raises(KeyError) as error:
        await handle.call(Server.fail)
    assert error.value.__notes__ == ["(in worker holder[0].fail)"]


class Drawer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def draw(self):
        return torch.rand(1).item()

    @register(Dispatch.ONE_TO_ALL)
    async def ask(self, handle):
        """An async method that awaits a plain method of another worker while its own call holds the generators."""
        return await handle.call(Drawer.draw)


def test_the_handle_of_a_worker_draws_from_the_workers_state_also_inside_another_call():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Drawer), name_prefix="drawer")
    asking = LocalWorkerGroup(None, ClassWithInitArgs(Drawer), name_prefix="asking")
    seed = worker_seed(0, "drawer", 0)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    found = [asyncio.run(group.handle().call(Drawer.draw)), group.draw()[0], asking.ask(group.handle(timeout=30))[0]]
    assert found == expected
