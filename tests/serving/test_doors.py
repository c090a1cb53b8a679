"""What a run opens, as the system lists it for its processes, held against the page that says so."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.harness.models import tiny_model_dir
from verl.agent_loop.server.endpoint import Endpoint
from verl.config import PPOTrainerConfig
from verl.config.loading.configuration import read_config
from verl.rollout.base import Request, SamplingParams
from verl.rollout.place import place_sampler
from verl.weight_sync import BroadcastTransport, DiskTransport, SharedMemoryTransport, shared_memory

SHARED = Path("/dev/shm")
MINE = "verl-"
USUAL = shared_memory.PREFIX
PREFIX = f"{USUAL}{os.getpid()}-"
"""How names of shared memory begin meanwhile, so that those of other tests are none of them."""


def names() -> set[Path]:
    """What lies in the folder for temporary files, which is this test's own, and in shared memory by its prefix."""
    return {*Path(tempfile.gettempdir()).glob(f"{MINE}*"), *(SHARED.glob(f"{PREFIX}*") if SHARED.is_dir() else ())}


def sockets() -> tuple[set[str], set[Path]]:
    """Addresses on which this process or one below it listens, and the paths of their unix sockets."""
    addresses, paths = set(), set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for entry in process.net_connections("all"):
            if entry.status == psutil.CONN_LISTEN:
                addresses.add(entry.laddr.ip)
            elif isinstance(entry.laddr, str) and MINE in entry.laddr:
                paths.add(Path(entry.laddr))
    return addresses, paths


class Conversation:
    key = "k"


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """A folder for temporary files of this test's own; its path is short."""
    tiny_model_dir(tmp_path_factory.mktemp("model"))  # pytest's folder and that of models stay where they are
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        patch.setattr(shared_memory, "PREFIX", PREFIX)
        yield Path(folder)


@pytest.fixture(scope="module")
def opened(tmp_path_factory, temporary):
    """Addresses, unix sockets, and new names with mode and owner, while everything of the first table is open."""
    before, (addresses, paths) = names(), sockets()
    model = tiny_model_dir(tmp_path_factory.mktemp("model"))
    keys = [f"actor_rollout_ref.model.path={model}"]
    keys += ["actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory"]
    config: PPOTrainerConfig = read_config("ppo_trainer", keys)
    policy = config.actor_rollout_ref
    sampler = place_sampler(policy.rollout, policy.model, "cpu")
    pairs = [BroadcastTransport.begin(0), SharedMemoryTransport(bucket_bytes=1 << 12), DiskTransport.begin(0)]
    seen = {}

    async def watched():
        async with Endpoint().open(Conversation()):
            await sampler.generate(Request("a", (5, 6), SamplingParams(max_tokens=2)))
            seen["sockets"] = sockets()[0], sockets()[1] - paths
            seen["names"] = {path: path.lstat() for path in names() - before}

    try:
        asyncio.run(watched())
    finally:
        for end in (sampler, *pairs):
            end.close()
    return {**seen, "addresses": seen["sockets"][0] - (addresses - {"127.0.0.1"}), "left": names() - before}


def test_every_address_is_loopback(opened):
    assert opened["addresses"] == {"127.0.0.1"}


def test_every_unix_socket_and_folder_is_this_users_alone(opened, temporary):
    (path,) = opened["sockets"][1]
    assert stat.S_IMODE(opened["names"][path.parent].st_mode) == 0o700 and path.parent.parent == temporary
    for path, found in opened["names"].items():
        assert found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode), path
        assert stat.S_IMODE(found.st_mode) == (0o700 if stat.S_ISDIR(found.st_mode) else 0o600), path


def test_nothing_stays_behind(opened):
    assert not opened["left"]


def test_the_page_names_each_of_them(opened, project_root):
    page = (project_root / "docs/concepts/security.md").read_text()
    listed = {path.name.replace(PREFIX, USUAL) for path in opened["names"]}
    patterns = {f"{name.rpartition('-')[0]}-*" for name in listed}
    assert patterns == {"verl-host-*", "verl-weights-*"} and all(pattern in page for pattern in patterns)
