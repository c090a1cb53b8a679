"""The error bodies of refused requests, in OpenAI's words."""

from __future__ import annotations

from verl.errors import RolloutError, suggest
from verl.serving import ApiError


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that cannot be followed."""
    return ApiError(400, message, code, param)


def unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    near = suggest(name, served)
    names = ", ".join(repr(model) for model in served)
    text = f"The model {name!r} does not exist. Served here: {names}. {near} "
    return ApiError(
        404, text + "The loop's setting 'models' names more of them ('*': any).", "model_not_found", "model"
    )


def refused(error: RolloutError) -> ApiError:
    """What the sampler refuses, as the client's mistake."""
    code = "context_length_exceeded" if error.key == "max_tokens" else "invalid_value"
    return ApiError(400, str(error), code, error.key)
