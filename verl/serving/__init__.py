"""The one way in which this library listens for HTTP: a socket that it binds itself, and no access without a secret."""

from verl.serving import secret
from verl.serving.answers import ApiError, Handle, HttpRequest, HttpResponse
from verl.serving.browsers import BrowserAccess
from verl.serving.listener import loopback, unix
from verl.serving.server import Server, ServerLimits

__all__ = [
    "ApiError",
    "BrowserAccess",
    "Handle",
    "HttpRequest",
    "HttpResponse",
    "Server",
    "ServerLimits",
    "loopback",
    "secret",
    "unix",
]
