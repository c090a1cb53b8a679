"""Marks in user code: a function whose calls stand in the traces, and a stretch that is a trace of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.observability import traces
from verl.observability.traced_call import add_texts


@dataclass(frozen=True)
class RolloutTraceConfig:
    """How this process records traces; a run sets it by ``actor_rollout_ref.rollout.trace``, a program by `init`.

    Attributes:
        backend: mlflow, weave, trackio; None: nothing is recorded.
        client: the backend's own module or client.
    """

    backend: str | None = None
    client: Any = None
    token2text: bool = False
    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Record traces from now on; does nothing where they are recorded already.

        Raises:
            ConfigError: an unknown backend.
            MissingDependencyError: its package is not installed.
        """
        if backend is not None and traces.active() is None:
            traces.start_traces(backend, project_name, experiment_name, token2text, max_samples_per_step_per_worker)

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        """What holds now."""
        active = traces.active()
        if active is None:
            return cls()
        names = active.backend.project, active.backend.experiment
        return cls(active.name, active.backend.client, active.token2text, *names, active.most)

    @classmethod
    def get_backend(cls) -> str | None:
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> Any:
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool:
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Write what there is, and record nothing from now on."""
        traces.stop_traces()


@contextmanager
def rollout_trace_attr(
    sample_index: Any = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """What runs inside is one trace with these attributes; with ``trace=False`` nothing of it is recorded."""
    if not trace:
        with traces.left_out():
            yield
        return
    labels = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes = {key: value for key, value in labels.items() if value is not None}
    with traces.trace(name, {}, {**attributes, "validate": validate}):
        yield


def rollout_trace_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calls of a function or method, plain or async, stand in the trace with arguments and result.

    Outside of any trace a call is one of its own. With ``token2text`` the tokens of a result (``prompt_ids``,
    ``response_ids``) have their text next to them, if the object that has the method has a ``tokenizer``.
    """
    parameters = inspect.signature(func)
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def waits(*args: Any, **kwargs: Any) -> Any:
            if traces.active() is None:
                return await func(*args, **kwargs)
            with _call(func.__qualname__, parameters, args, kwargs) as done:
                return done(await func(*args, **kwargs))

        return waits

    @functools.wraps(func)
    def runs(*args: Any, **kwargs: Any) -> Any:
        if traces.active() is None:
            return func(*args, **kwargs)
        with _call(func.__qualname__, parameters, args, kwargs) as done:
            return done(func(*args, **kwargs))

    return runs


@contextmanager
def _call(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Iterator[Callable[[Any], Any]]:
    """A call that is recorded; what it gives takes the result, and returns it."""
    inputs, owner = _arguments(signature, args, kwargs)
    decode = getattr(getattr(owner, "tokenizer", None), "decode", None)
    with traces.trace(name, inputs, {}, kind="function") as call:

        def done(result: Any) -> Any:
            if call is not None:
                has_tokens = hasattr(result, "prompt_ids") and hasattr(result, "__dict__")
                call.returns(vars(result) if has_tokens else result)
                active = traces.active()
                if active is not None and active.token2text and decode is not None:
                    add_texts(call, decode)
            return result

        yield done


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
    """The arguments by name, and the object of a method; wrong ones are left for the function to refuse."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {"args": args, "kwargs": kwargs}, None
    bound.apply_defaults()
    values = dict(bound.arguments)
    return values, values.pop("self", None)
