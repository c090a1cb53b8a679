"""What a client is told when a request is refused: HTTP status and a body in OpenAI's form."""

from __future__ import annotations

from typing import Any

from verl.errors import RolloutError, suggest


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: what is wrong, for the person who wrote the client.
        code: OpenAI's word for it (``invalid_api_key``, ``model_not_found``, ...).
        param: the field of the request that is at fault.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that cannot be followed."""
    return ApiError(400, message, code, param)


def unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    near = suggest(name, served)
    known = ", ".join(repr(model) for model in served)
    text = f"The model {name!r} does not exist. Served here: {known}. {near} "
    return ApiError(
        404, text + "The loop's setting 'models' names more of them ('*': any).", "model_not_found", "model"
    )


def refused(error: RolloutError) -> ApiError:
    """What the sampler refuses, as the client's mistake."""
    code = "context_length_exceeded" if error.key == "max_tokens" else "invalid_value"
    return ApiError(400, str(error), code, error.key)
