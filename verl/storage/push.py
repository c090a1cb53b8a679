"""Put a model folder into a repository of a hub: Hugging Face, or ModelScope. Only ever on request."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from verl import env
from verl.errors import ConfigError, MissingDependencyError, ModelError
from verl.storage.fetch import first_line
from verl.storage.paths import HUB_NAME, expand

Hub = Literal["huggingface", "modelscope"]
NEEDED = "config.json"


def default_hub() -> Hub:
    """The hub that names are looked up at: ModelScope with VERL_USE_MODELSCOPE set, else Hugging Face."""
    return "modelscope" if env.get_flag("VERL_USE_MODELSCOPE") else "huggingface"


def check_push(repository: str, hub: str, key: str) -> None:
    """Raise before work begins if a folder could not be pushed there by name.

    Raises:
        ConfigError: no repository's name, or no such hub.
    """
    if hub not in get_args(Hub):
        raise ConfigError("there is no such hub", key="--hub", got=hub, allowed=get_args(Hub))
    if HUB_NAME.fullmatch(repository) is None:
        raise ConfigError("is no name of a repository", key=key, got=repository, allowed="owner/name")


def push_to_hub(folder: str | Path, repository: str, hub: Hub = "huggingface", private: bool = False) -> str:
    """Create the repository if it is missing, and make one commit of all files of the folder.

    The token is the one of the hub's own login (``HF_TOKEN``, ``MODELSCOPE_API_TOKEN``, or its stored one).

    Args:
        folder: a Hugging Face model folder.
        private: a repository that is created is private; one that exists stays as it is.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: no repository's name.
        ModelError: no model folder, or the hub refuses or does not answer.
        MissingDependencyError: the package of ModelScope is not installed.
    """
    check_push(repository, hub, "repository")
    path = Path(expand(str(folder)))
    if not (path / NEEDED).is_file():
        raise ModelError(f"a model folder with {NEEDED} is needed", got=str(folder))
    try:
        return (_to_modelscope if hub == "modelscope" else _to_hugging_face)(path, repository, private)
    except MissingDependencyError:
        raise
    except Exception as failure:  # boundary: the hubs' clients raise errors of their own HTTP libraries
        raise ModelError(
            f"the hub {hub} did not take the model: {first_line(failure)}",
            got=repository,
            fix=f"The folder {path} is complete; check the token, the name and the network, and push it again.",
        ) from failure


def _to_hugging_face(folder: Path, repository: str, private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    # Without a wish for privacy the owner's own default holds.
    address = api.create_repo(repository, private=private or None, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload the model")
    return str(address)


def _to_modelscope(folder: Path, repository: str, private: bool) -> str:
    try:
        from modelscope.hub.api import HubApi
    except ImportError as failure:
        raise MissingDependencyError(
            "the package modelscope is not installed", fix="pip install modelscope"
        ) from failure
    api = HubApi()
    api.create_repo(repository, visibility="private" if private else "public", repo_type="model", exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload the model")
    return f"https://modelscope.cn/models/{repository}"
