"""What a run knows of estimators, losses and schedules before their code is loaded, and what follows from it."""

from __future__ import annotations

import inspect
import sys

import pytest

from tests.harness.configs import describe
from tests.harness.programs import python
from verl.algorithms.policy_losses import aggregation_of
from verl.config import PPOTrainerConfig, load_config
from verl.config.schema.node import leaves
from verl.config.schema.root import learns_from_pairs, skips_old_log_prob, uses_critic, uses_reference
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, EstimatorFacts, LossFacts, Registry

ESTIMATORS = sorted(ADVANTAGE_ESTIMATORS.builtin_targets())
SETTINGS = {key for key, _ in leaves(PPOTrainerConfig)}
ALGORITHM, ACTOR, R = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_facts_of_a_built_in_estimator_are_those_of_its_parameters(name):
    parameters = inspect.signature(ADVANTAGE_ESTIMATORS.get(name)).parameters
    facts = ADVANTAGE_ESTIMATORS.facts(name)
    required = {p.name for p in parameters.values() if p.default is p.empty}
    assert facts.values == ("values" in required)
    assert facts.groups == bool({"index"} & required), "it needs the prompt of each row, so it compares"
    assert facts.old_log_probs == ("old_log_probs" in required)
    assert {f"{ALGORITHM}.{setting}" for setting in facts.settings} <= SETTINGS


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.builtin_targets()))
def test_the_facts_of_a_built_in_loss_are_those_of_its_code(name):
    facts, loss = POLICY_LOSSES.facts(name), POLICY_LOSSES.get(name)
    assert {f"{ACTOR}.{setting}" for setting in facts.settings} <= SETTINGS and not facts.pairs
    forced = aggregation_of(loss, "the configured one")
    assert name == "geo_mean" or (facts.aggregation or "the configured one") == forced
    source = inspect.getsource(sys.modules[loss.__module__])
    assert all(setting.rpartition(".")[2] in source for setting in facts.settings)


def test_facts_of_built_ins_are_known_without_torch():
    code = (
        "from verl.registry import ADVANTAGE_ESTIMATORS as a; import sys;"
        "assert a.facts('gae').values and a.facts('rloo').groups and 'torch' not in sys.modules"
    )
    python("-c", code)


MINE = """
from verl.registry import EstimatorFacts, LossFacts

FACTS = {
    "ranked": EstimatorFacts(groups=True, rewards="gdpo_reward_keys"),
    "valued": EstimatorFacts(values=True),
    "old": EstimatorFacts(old_log_probs=True),
    "apart": LossFacts(pairs=True),
    "bounded": LossFacts(required=("policy_loss.dro_beta",), aggregation="a sum"),
    "wrong": LossFacts(),
}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package ``my_own``, whose module would take long to load: it cannot be."""
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own/__init__.py").write_text(MINE)
    (tmp_path / "my_own/slow.py").write_text("raise RuntimeError('this takes long')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_own"]:
        del sys.modules[name]


@pytest.fixture
def load(workplace):
    """A configuration that is valid but for the words."""
    describe()
    (workplace / "scorer.py").touch()
    usual = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=model",
             "reward.custom_reward_function.path=scorer.py"]  # fmt: skip

    def read(*words: str) -> PPOTrainerConfig:
        return load_config("ppo_trainer", [*usual, *words])

    return read


def test_the_facts_of_a_dotted_path_stand_in_its_package(mine):
    assert ADVANTAGE_ESTIMATORS.facts("my_own.slow:ranked").groups
    assert ADVANTAGE_ESTIMATORS.facts("my_own.slow.valued") == EstimatorFacts(values=True)
    assert POLICY_LOSSES.facts("my_own.slow:apart") == LossFacts(pairs=True)
    assert POLICY_LOSSES.facts("my_own.slow:other") == LossFacts()
    assert POLICY_LOSSES.facts("there_is_none:other") == LossFacts()
    with pytest.raises(ConfigError, match=r"another class.*Allowed: EstimatorFacts"):
        ADVANTAGE_ESTIMATORS.facts("my_own.slow:wrong")


@pytest.mark.parametrize("between", [":", "."])
def test_a_built_in_that_is_named_by_its_path_has_its_facts(between):
    for table in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        for name, target in table.builtin_targets().items():
            assert table.facts(target.replace(":", between)) == table.facts(name)


def test_facts_are_given_where_a_name_is_registered():
    own = Registry("estimator", {"built": "a:b"}, facts=EstimatorFacts)
    own.register("mine", EstimatorFacts(groups=True))(len)
    assert own.facts("mine").groups and own.facts("built") == own.facts("unknown") == EstimatorFacts()
    with pytest.raises(ConfigError, match="another class"):
        own.register("other", LossFacts())(max)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["algorithm.adv_estimator=my_own.slow:ranked"], f"{R}.n: the estimator 'my_own.slow:ranked' compares"),
        (["algorithm.adv_estimator=my_own.slow:ranked", f"{R}.n=2"], "gdpo_reward_keys: the estimator"),
        (["algorithm.adv_estimator=my_own.slow:valued", "critic.enable=false"], "needs the values of a critic"),
        (
            [
                "algorithm.adv_estimator=my_own.slow:old",
                "algorithm.rollout_correction.bypass_mode=true",
                f"{R}.calculate_log_probs=true",
            ],
            "needs the pass over old log-probs",
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=my_own.slow:apart"], "a pair is the best and the worst"),
        ([f"{ACTOR}.policy_loss.loss_mode=my_own.slow:bounded"], "dro_beta: the policy loss 'my_own.slow:bounded'"),
    ],
)
def test_facts_of_ones_own_are_held_against_the_settings(mine, load, words, says):
    with pytest.raises(ConfigError) as error:
        load(*words)
    assert says in str(error.value)


def test_facts_of_ones_own_decide_what_a_run_has(mine, load):
    pairs = load(f"{ACTOR}.policy_loss.loss_mode=my_own.slow:apart", f"{R}.n=2", "algorithm.adv_estimator=grpo")
    assert learns_from_pairs(pairs) and uses_reference(pairs) and not uses_critic(pairs)
    valued = load("algorithm.adv_estimator=my_own.slow:valued", "trainer.skip_old_log_prob=true")
    assert uses_critic(valued) and not uses_reference(valued) and not learns_from_pairs(valued)
    once = [f"{ACTOR}.ppo_mini_batch_size=1024", "data.train_batch_size=1024", "critic.enable=false"]
    assert not skips_old_log_prob(load("algorithm.adv_estimator=my_own.slow:old", *once))
    assert skips_old_log_prob(load("algorithm.adv_estimator=reinforce_plus_plus", *once))


def test_a_setting_of_another_estimator_or_loss_is_told_with_one_that_reads_it(load):
    load("algorithm.adv_estimator=rloo", f"{R}.n=2", "algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.tau_pos=2")
    told = notices()
    assert told["algorithm.norm_adv_by_std_in_grpo"] == "has no effect without algorithm.adv_estimator=grpo"
    assert told[f"{ACTOR}.tau_pos"] == f"has no effect without {ACTOR}.policy_loss.loss_mode=sapo"


def test_a_function_of_ones_own_leaves_the_notices_about_the_other_section(mine, load):
    """A loss is given the actor's settings and an estimator those of the algorithm; what its facts say is told, too."""
    changed = [f"{R}.n=2", "algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.tau_pos=2",
               f"{ACTOR}.loss_agg_mode=token-sum"]  # fmt: skip
    own_loss = [f"{ACTOR}.policy_loss.loss_mode=my_own.slow:bounded", f"{ACTOR}.policy_loss.dro_beta=1"]
    reset_notices()
    load("algorithm.adv_estimator=rloo", *own_loss, *changed)
    told = notices()
    assert "without algorithm.adv_estimator=grpo" in told["algorithm.norm_adv_by_std_in_grpo"]
    assert told[f"{ACTOR}.loss_agg_mode"].endswith("'my_own.slow:bounded', which takes a sum")
    assert f"{ACTOR}.tau_pos" not in told and f"{ACTOR}.policy_loss.dro_beta" not in told
    reset_notices()
    load("algorithm.adv_estimator=my_own.slow:old", *changed)
    assert f"{ACTOR}.tau_pos" in notices() and "algorithm.norm_adv_by_std_in_grpo" not in notices()
