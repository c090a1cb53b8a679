import math

import pytest
import torch

from verl.algorithms.schedules import (
    build_schedule,
    cosine_factor,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
    warmup_steps,
    wsd_factor,
)
from verl.config import OptimizerConfig
from verl.errors import ConfigError


def learning_rates(build, steps=11):
    """The rate that each of ``steps`` updates uses, from a rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = build(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_constant_after_a_linear_warm_up():
    assert learning_rates(lambda o: get_constant_schedule_with_warmup(o, 2), 4) == [0, 0.5, 1, 1]


def test_without_a_warm_up_the_first_step_is_not_lost():
    assert cosine_factor(0, 0, 10) == wsd_factor(0, 0, 10) == 1
    assert learning_rates(lambda o: get_constant_schedule_with_warmup(o, 0), 2) == [1, 1]


def test_cosine_worked_numbers_for_ten_steps_and_a_warm_up_of_two():
    rates = learning_rates(lambda o: get_cosine_schedule_with_warmup(o, 2, 10))
    assert rates[:3] == [0, 0.5, 1]
    assert (rates[6], rates[10]) == (pytest.approx(0.5), pytest.approx(0))
    assert rates[4] == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def test_cosine_floor_start_and_step_that_counts_from_one():
    assert cosine_factor(10, 2, 10, min_lr_ratio=0.1) == pytest.approx(0.1)
    assert cosine_factor(6, 2, 10, min_lr_ratio=0.1) == pytest.approx(0.55)
    assert cosine_factor(1, 2, 10, init_lr_ratio=0.2) == pytest.approx(0.6)
    shifted = learning_rates(lambda o: get_cosine_schedule_with_warmup(o, 2, 10, zero_indexed_step=False), 3)
    assert shifted[:2] == [0.5, 1]


def test_wsd_is_stable_for_nine_tenths_and_then_decays_to_the_floor():
    rates = learning_rates(lambda o: get_wsd_schedule_with_warmup(o, 10, 110, min_lr_ratio=0.1), 120)
    assert rates[5] == 0.5 and rates[10:100] == [1.0] * 90  # stable until 10 + 0.9 * 100
    assert rates[105] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[110:] == [pytest.approx(0.1)] * 10


def test_warm_up_steps_win_over_the_ratio():
    assert warmup_steps(100, 7, 0.5) == 7
    assert warmup_steps(105, -1, 0.1) == 10
    assert warmup_steps(100, 0, 0.0) == 0


def section(**changes):
    return OptimizerConfig(**{"lr": 1.0, "lr_warmup_steps": 2, **changes})


def test_schedules_are_built_from_an_optimizer_section():
    rate = lambda kind, step: learning_rates(lambda o: build_schedule(o, section(lr_scheduler_type=kind), 10))[step]
    assert (rate("constant", 9), rate("cosine", 6), rate("wsd", 8)) == (1, pytest.approx(0.5), 1)
    with pytest.raises(ConfigError, match=r"lr_scheduler_type.*Did you mean 'cosine'"):
        rate("cosin", 0)
    with pytest.raises(ConfigError, match=r"min_lr_ratio.*between 0 and 1"):
        learning_rates(lambda o: build_schedule(o, section(lr_scheduler_type="cosine", min_lr_ratio=2.0), 10))


MEGATRON = [
    {"lr_decay_style": "constant", "lr_warmup_init": 0.1},
    {"lr_decay_style": "linear", "min_lr": 0.05, "lr_warmup_init": 0.1},
    {"lr_decay_style": "cosine", "min_lr": 0.05, "lr_decay_steps": 9},
    {"lr_decay_style": "cosine", "lr_warmup_steps": -1},
    {"lr_decay_style": "inverse_square_root", "min_lr": 0.2},
    *({"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_steps": 4, "min_lr": 0.1}
      for style in ("linear", "cosine", "exponential", "minus_sqrt")),
]  # fmt: skip


@pytest.mark.parametrize("changes", MEGATRON, ids=lambda changes: "-".join(str(value) for value in changes.values()))
def test_a_decay_style_gives_the_rates_of_megatrons_own_scheduler(changes):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optim, steps = section(**{"lr": 0.5, **changes}), 14
    theirs = OptimizerParamScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5),
        init_lr=optim.lr_warmup_init,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=max(0, optim.lr_warmup_steps),
        lr_decay_steps=optim.lr_decay_steps or 12,
        lr_decay_style=optim.lr_decay_style.replace("_", "-"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=12,
        wd_incr_style="constant",
        wsd_decay_steps=optim.lr_wsd_decay_steps,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
    )
    expected = []
    for _ in range(steps):
        expected.append(theirs.optimizer.param_groups[0]["lr"])
        theirs.step(1)
    ours = build_schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5), optim, 12)
    found = []
    for _ in range(steps):
        found.append(ours.get_last_lr()[0])
        ours.optimizer.step()
        ours.step()
    assert found == pytest.approx(expected)


def test_a_scheduler_resumes_from_its_state():
    def optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    first = get_cosine_schedule_with_warmup(optimizer(), 2, 10)
    for _ in range(5):
        first.optimizer.step()
        first.step()
    second = get_cosine_schedule_with_warmup(optimizer(), 2, 10)
    second.load_state_dict(first.state_dict())
    second.optimizer.step()
    first.step(), second.step()
    assert first.get_last_lr() == second.get_last_lr()
