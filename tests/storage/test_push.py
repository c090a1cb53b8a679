"""Pushing a model: to a hub on this machine with the real client of Hugging Face, and through ModelScope's calls."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from tests.harness.hub import fake_hub
from tests.harness.programs import python
from verl.errors import ConfigError, MissingDependencyError, ModelError
from verl.storage import push_to_hub


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def push(hub, folder, *arguments: str) -> subprocess.CompletedProcess:
    """In a process of its own: the client reads its settings when it is imported."""
    code = (
        "import sys\nfrom verl.storage import push_to_hub as go\nprint(go(*sys.argv[1:3], private=len(sys.argv) > 3))"
    )
    return python("-c", code, str(folder), "me/model", *arguments, timeout=120, check=False, **hub.variables)


@pytest.mark.parametrize("private", [False, True])
def test_a_folder_becomes_one_commit_of_a_new_repository(model, private):
    with fake_hub() as hub:
        done = push(hub, model, *(["private"] if private else []))
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == f"{hub.url}/me/model"
        assert hub.files == {"config.json": b"{}", "model.safetensors": b"weights"}
        (created,) = hub.created
        assert (created["organization"], created["name"]) == ("me", "model")
        assert (created.get("private") or created.get("visibility") == "private") is (private or None or False)
        assert hub.tokens == {"Bearer hf_test"}


def test_a_hub_that_refuses_leaves_the_folder_and_says_so(model):
    with fake_hub(refuses=403) as hub:
        done = push(hub, model)
        assert done.returncode != 0
        assert "the hub huggingface did not take the model" in done.stderr and "is complete" in done.stderr
        assert hub.files == {}


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "me/../other", "https://hub/me/model"])
def test_what_is_no_repository_is_refused(model, name):
    with pytest.raises(ConfigError, match="is no name of a repository"):
        push_to_hub(model, name)


def test_an_unknown_hub_and_a_folder_without_a_model_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"--hub: there is no such hub.*huggingface, modelscope"):
        push_to_hub(model, "me/model", "github")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"config\.json is needed"):
        push_to_hub(tmp_path, "me/model")


def test_modelscope_is_asked_for_a_repository_and_an_upload(model, monkeypatch):
    calls = []

    class HubApi:
        def create_repo(self, repo_id, *, visibility, repo_type, exist_ok):
            calls.append((repo_id, visibility, repo_type, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls.append((repo_id, folder_path))

    names = ("modelscope", "modelscope.hub", "modelscope.hub.api")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["modelscope.hub.api"].HubApi = HubApi
    assert push_to_hub(model, "me/model", "modelscope", private=True) == "https://modelscope.cn/models/me/model"
    assert calls == [("me/model", "private", "model", True), ("me/model", str(model))]


def test_without_modelscope_its_package_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MissingDependencyError, match="pip install modelscope"):
        push_to_hub(model, "me/model", "modelscope")
