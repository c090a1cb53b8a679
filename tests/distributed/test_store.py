"""Where groups of processes listen: on the address that was named, and on no other one of this machine."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import psutil
import pytest
import torch

from verl.distributed import store
from verl.metrics import notices, reset_notices
from verl.weight_sync import BroadcastTransport, WeightChunk

LIMIT = timedelta(seconds=20)


def listening() -> set[str]:
    """The addresses on which this process listens."""
    found = psutil.Process().net_connections("inet")
    return {entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_the_address_that_was_named_and_keeps_what_is_put_there():
    before = listening()
    ours = store.meet("127.0.0.1", 0, 2, True, LIMIT, waits=False)
    theirs = store.meet("127.0.0.1", ours.port, 2, False, LIMIT, waits=False)
    theirs.set("a", "b")
    assert ours.get("a") == b"b"
    assert listening() - before <= {"127.0.0.1"} and "127.0.0.1" in listening()


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match=f"rank 0 cannot listen on 127.0.0.1:{port}"):
            store.meet("127.0.0.1", port, 2, True, LIMIT)


def test_weights_that_are_broadcast_open_no_door_but_on_loopback():
    before = listening()
    ours = BroadcastTransport.begin(0, timeout=20)
    theirs = BroadcastTransport.reach(ours.address)
    chunk = WeightChunk(1, [("a", torch.ones(3))], True)
    sending = threading.Thread(target=ours.send, args=([chunk],))
    sending.start()
    (arrived,) = list(theirs.receive())
    sending.join(20)
    assert dict(arrived.tensors)["a"].tolist() == [1, 1, 1]
    assert listening() - before <= {"127.0.0.1"}


def test_the_way_to_an_address_has_an_interface_and_one_that_leads_nowhere_is_told(monkeypatch):
    monkeypatch.setenv(store.GLOO_INTERFACE, "")
    assert store.address_towards("127.0.0.1") == "127.0.0.1" and store.interface_of("127.0.0.1") == "lo"
    store.keep_gloo_on("127.0.0.1")
    assert store.env.get(store.GLOO_INTERFACE) == "lo"
    monkeypatch.setenv(store.GLOO_INTERFACE, "mine")
    store.keep_gloo_on("127.0.0.1")
    assert store.env.get(store.GLOO_INTERFACE) == "mine"
    monkeypatch.setenv(store.GLOO_INTERFACE, "")
    reset_notices()
    store.keep_gloo_on("no-such-machine.invalid")
    assert store.GLOO_INTERFACE in notices() and store.env.get(store.GLOO_INTERFACE) is None
