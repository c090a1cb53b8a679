from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from verl.errors import DataError, MissingDependencyError
from verl.storage import remote_folder


@pytest.fixture(params=["hdfs", "file", "memory", "path"])
def folder(request, tmp_path):
    if request.param == "hdfs":
        request.getfixturevalue("fake_hdfs")
    urls = {
        "hdfs": "hdfs://cluster/run",
        "file": f"file://{tmp_path}/there/run",
        "memory": f"memory://{tmp_path.name}/run",
        "path": str(tmp_path / "mounted" / "run"),
    }
    return remote_folder(urls[request.param])


def test_files_go_there_and_back(folder, tmp_path):
    assert folder.names() == [] and folder.read("step/manifest.json") is None
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 4)
    folder.put(tmp_path / "weights", "step/model/weights")
    folder.put_text("first", "step/manifest.json")
    folder.put_text("second", "step/manifest.json")
    assert folder.names() == ["step"] and folder.read("step/manifest.json") == "second"
    assert folder.sizes(["step/model/weights", "step/manifest.json"]) == [1024, 6]
    folder.get("step/model/weights", tmp_path / "back" / "weights")
    assert (tmp_path / "back" / "weights").read_bytes() == (tmp_path / "weights").read_bytes()
    folder.remove("step")
    folder.remove("step")
    assert folder.names() == [] and folder.read("step/manifest.json") is None
    with pytest.raises(DataError):
        folder.get("step/model/weights", tmp_path / "again")


def test_what_the_user_alone_may_read_stays_so_on_a_mounted_disk(tmp_path):
    secret = tmp_path / "config.yaml"
    secret.write_text("key: secret")
    secret.chmod(0o600)
    remote_folder(str(tmp_path / "there")).put(secret, "config.yaml")
    assert (tmp_path / "there" / "config.yaml").stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_used_says_why(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no file system has this form of URL.*Allowed: hdfs, s3"):
        remote_folder("tape://archive/run")
    with pytest.raises(MissingDependencyError, match=r"adlfs"):
        remote_folder("abfs://bucket/run")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="does not answer as it should"):
        remote_folder(str(tmp_path / "file" / "run")).put_text("x", "a")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="needs the command 'hdfs'"):
        remote_folder("hdfs://cluster/run").names()


def test_a_place_that_hangs_ends_a_request_after_its_time(tmp_path, monkeypatch, fake_hdfs):
    script = tmp_path / "bin" / "hdfs"
    script.write_text("#!/bin/sh\nsleep 60 & echo $! > $(dirname $0)/pid; wait\n")
    with pytest.raises(DataError, match=r"'hdfs dfs -test -e hdfs://cluster/run' was ended: .* within 1 s"):
        remote_folder("hdfs://cluster/run", seconds=1).names()
    started = int((tmp_path / "bin" / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(started)
    released = threading.Event()
    folder = remote_folder(f"memory://{tmp_path.name}", seconds=0.2)
    monkeypatch.setattr(folder._files, "put_file", lambda *paths: released.wait(60))
    (tmp_path / "weights").write_bytes(bytes(2_000_000))
    with pytest.raises(DataError, match=rf"gave no answer within 0\.4 s. Got 'memory://{tmp_path.name}'"):
        folder.put(tmp_path / "weights", "weights")  # 0.2 s more, as 10 MB may take a second
    released.set()


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_cluster_that_does_not_answer_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    script = tmp_path / "hdfs"
    script.write_text(
        "#!/bin/sh\necho 'test: Call From here to cluster:8020 failed on connection exception' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(DataError, match=r"failed on connection exception.*hdfs://cluster/run"):
        remote_folder("hdfs://cluster/run").names()
    script.write_text("#!/bin/sh\necho 'WARN util.NativeCodeLoader: test: nothing' >&2\nexit 1\n")
    assert remote_folder("hdfs://cluster/run").names() == []
