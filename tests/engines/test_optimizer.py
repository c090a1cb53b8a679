from __future__ import annotations

import pytest
import torch

from verl.config import OptimizerConfig
from verl.engines.optimizer import build_optimizer
from verl.errors import ConfigError


def parameters():
    return [torch.nn.Parameter(torch.ones(3))]


def test_the_default_is_a_fused_adamw_with_the_configured_numbers():
    optimizer = build_optimizer(parameters(), OptimizerConfig(lr=0.5, betas=[0.8, 0.9], weight_decay=0.2), "cpu")
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, torch.optim.AdamW) and group["fused"] is True
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.2)


def test_the_override_wins_and_reaches_the_optimizer():
    config = OptimizerConfig(override_optimizer_config={"eps": 1e-3, "fused": False, "weight_decay": 0.0})
    group = build_optimizer(parameters(), config, "cpu").param_groups[0]
    assert (group["eps"], group["fused"], group["weight_decay"]) == (1e-3, False, 0.0)


def test_an_optimizer_without_betas_gets_none():
    assert "betas" not in build_optimizer(parameters(), OptimizerConfig(optimizer="SGD"), "cpu").param_groups[0]


def test_an_unknown_optimizer_is_an_error_with_the_names():
    with pytest.raises(ConfigError, match=r"no such optimizer.*SGD.*Did you mean 'AdamW'"):
        build_optimizer(parameters(), OptimizerConfig(optimizer="AdamWW"), "cpu")


def test_a_class_that_is_no_optimizer_is_an_error():
    with pytest.raises(ConfigError, match=r"no such optimizer"):
        build_optimizer(parameters(), OptimizerConfig(optimizer="Linear", optimizer_impl="torch.nn"), "cpu")


def test_an_unknown_module_is_an_error_that_names_its_key():
    with pytest.raises(ConfigError, match=r"optimizer_impl.*no_such_package"):
        build_optimizer(parameters(), OptimizerConfig(optimizer_impl="no_such_package.optim"), "cpu")


def test_an_unknown_override_is_an_error_with_the_arguments():
    with pytest.raises(ConfigError, match=r"override_optimizer_config.epss.*Did you mean 'eps'"):
        build_optimizer(parameters(), OptimizerConfig(override_optimizer_config={"epss": 1}), "cpu")
