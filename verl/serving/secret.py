"""A key that both sides of a connection know: the client shows it, and the server proves that it knows it, too.

A server that took the port of another one first cannot prove it, so a client neither tells it the key nor believes what
it answers. The proof is a keyed hash over a number of the client's that is used once, and over the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE, PROOF = "x-verl-nonce", "x-verl-proof"
"""Headers of a request and of its answer."""
PATH = "/verl/proof"
"""Answered without the key: the proof for a number, and nothing else."""
LONGEST = 64


def new_key() -> str:
    """A key that cannot be guessed."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(16)


def of_server(key: str, nonce: str) -> str:
    """The proof that a server knows the key."""
    return _hash(key, b"server", nonce, b"")


def of_answer(key: str, nonce: str, status: int, body: bytes) -> str:
    """The proof that an answer comes from a server that knows the key, and belongs to this request."""
    return _hash(key, f"answer {status}".encode(), nonce, body)


def same(one: str, other: str) -> bool:
    """Takes the same time for any wrong one."""
    return hmac.compare_digest(one.encode(), other.encode())


def _hash(key: str, purpose: bytes, nonce: str, body: bytes) -> str:
    text = b"\n".join((purpose, nonce.encode(), hashlib.sha256(body).digest()))
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
