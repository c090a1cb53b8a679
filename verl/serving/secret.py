"""A key that both sides of a connection know and neither sends: the server proves that it knows it, and requests and
answers are signed with it.

A server that took the port of another one first cannot prove it: a client sends it nothing and believes nothing of it.
The proof is a keyed hash over a number of the client's that is used once. A signature is one over the head of a request
and the hash of its body, for one run of one server. Servers remember no numbers: a program that hears a request cannot
change it or use it elsewhere, but may send it again to the same run.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE, PROOF, DIGEST = "x-verl-nonce", "x-verl-proof", "x-verl-digest"
"""Headers of a request and of its answer."""
PATH = "/verl/proof"
"""Answered without the key: the proof for a number and a run, and nothing else."""
LONGEST = 64


def new_key() -> str:
    """A key that cannot be guessed."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(16)


def digest(body: bytes) -> str:
    """The hash of a body."""
    return hashlib.sha256(body).hexdigest()


def of_server(key: str, nonce: str, run: str) -> str:
    """The proof that a server knows the key, and the name of its run."""
    return _hash(key, "server", nonce, run)


def of_request(key: str, run: str, nonce: str, method: str, host: str, target: str, body_digest: str) -> str:
    """The signature of a request to one run of the server at ``host``."""
    return _hash(key, "request", nonce, run, method, host, target, body_digest)


def of_answer(key: str, nonce: str, status: int, body: bytes) -> str:
    """The proof that an answer comes from a server that knows the key, and belongs to this request."""
    return _hash(key, "answer", nonce, str(status), digest(body))


def same(one: str, other: str) -> bool:
    """Takes the same time for any wrong one."""
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))


def _hash(key: str, *parts: str) -> str:
    return hmac.new(key.encode(), "\n".join(parts).encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
