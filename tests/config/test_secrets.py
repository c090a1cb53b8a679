"""Secrets are in no file, print-out, tracker or message."""

from __future__ import annotations

import os
import stat
from typing import ClassVar

import pytest

from verl.config import load_config, save_config, to_dict
from verl.config.loading.configuration import read_config, to_yaml
from verl.config.loading.secrets import hide
from verl.errors import HIDDEN, ConfigError, RewardError, hide_in_text
from verl.metrics import notice, notices
from verl.observability.tracker import Tracker
from verl.observability.tracking import Tracking

SECRET = "s3cr3t-w0rd"
GIVEN = [
    "trainer.wandb_proxy=http://me:s3cr3t-w0rd@proxy:3128",
    "reward.sandbox_fusion.url=http://box:8080/run?access_token=s3cr3t-w0rd&n=1",
    "+reward.custom_reward_function.reward_kwargs.openai_key=s3cr3t-w0rd",
    "+reward.custom_reward_function.reward_kwargs.headers.Authorization=s3cr3t-w0rd",
    "+reward.custom_reward_function.reward_kwargs.model=judge-2",
]


@pytest.fixture
def config():
    return read_config("ppo_trainer", GIVEN)


def test_a_saved_configuration_has_no_secret_and_is_the_users_alone(config, tmp_path):
    (tmp_path / "config.yaml").write_text("old")
    os.chmod(tmp_path / "config.yaml", 0o644)
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text and text.count(HIDDEN) == 4
    assert "judge-2" in text and "n=1" in text and "proxy:3128" in text
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600


def test_the_printed_configuration_has_no_secret(capsys):
    with pytest.raises(SystemExit):
        load_config("ppo_trainer", ["--cfg", "job", *GIVEN])
    assert SECRET not in capsys.readouterr().out


def test_what_was_left_out_is_not_taken_for_a_value(config, tmp_path):
    save_config(config, tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"secret was left out here.*Give the value again"):
        read_config("ppo_trainer", ["--config-path", str(tmp_path), "--config-name", "run"])


def test_names_of_columns_and_tokens_are_no_secrets():
    config = read_config("ppo_trainer", ["data.prompt_key=question", "data.reward_fn_key=source"])
    assert HIDDEN not in to_yaml(config) and hide(to_dict(config)) == to_dict(config)


class Keeps(Tracker):
    seen: ClassVar[dict] = {}

    def __init__(self, project_name, experiment_name, config=None):
        super().__init__(project_name, experiment_name, config)
        type(self).seen = dict(config)

    def log(self, data, step):
        pass


def test_trackers_get_no_secret(config):
    Tracking("p", "e", f"{__name__}:Keeps", to_dict(config)).finish()
    assert SECRET not in str(Keeps.seen)
    assert Keeps.seen["reward"]["custom_reward_function"]["reward_kwargs"]["model"] == "judge-2"


def test_messages_have_no_secret():
    error = RewardError("no answer from http://me:s3cr3t-w0rd@judge/v1", got="https://h/x?api_key=s3cr3t-w0rd")
    notice("reward", "asks http://me:s3cr3t-w0rd@judge/v1")
    assert SECRET not in str(error) and "judge/v1" in str(error)
    assert SECRET not in notices()["reward"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pa/ss@host:1/0", "redis://:pa/ss@host:1/0"),  # a slash ends the part before the host
        ("redis://:pass@host:1/0", f"redis://{HIDDEN}@host:1/0"),
        ("http://a@b@host", f"http://{HIDDEN}@host"),
        ("s3://x?X-Amz-Signature=abc&y=2", f"s3://x?X-Amz-Signature={HIDDEN}&y=2"),
        ("Authorization: Bearer abcdefgh1234", f"Authorization: Bearer {HIDDEN}"),
        ("key sk-abcdefghijklmnop1234", f"key {HIDDEN}"),
        ("hf_abcdefghijklmnopqr", HIDDEN),
        ("me@example.org wrote", "me@example.org wrote"),
        ("max_tokens=8 token=3", "max_tokens=8 token=3"),
    ],
)
def test_forms_of_secrets_in_text(text, shown):
    assert hide_in_text(text) == shown
