"""What a command line with teachers says before anything is loaded."""

import json

import pytest

from tests.harness.configs import refused
from verl.config import load_config
from verl.config.machine.topology import Topology, added_roles
from verl.config.schema.root import teachers_of
from verl.errors import ConfigError

D, L, T = "distillation", "distillation.distillation_loss", "distillation.teacher_models"


@pytest.fixture
def words(tmp_path, workplace):
    def folder(name, vocabulary):
        (tmp_path / name).mkdir()
        facts = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocabulary}
        (tmp_path / name / "config.json").write_text(json.dumps(facts))
        return str(tmp_path / name)

    (tmp_path / "train.parquet").write_bytes(b"")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"actor_rollout_ref.model.path={folder('policy', 100)}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"{D}.enabled=true",
        f"{T}.teacher_model.model_path={folder('teacher', 100)}",
        f"{T}.teacher_model.key=null",
    ]


def test_upstreams_default_teacher_is_a_role_in_the_trainers_pool(words):
    config = load_config("ppo_trainer", words)
    [teacher] = teachers_of(config)
    assert (teacher.name, teacher.serves) == ("teacher_model", None)
    part = Topology.of(config, added_roles(config)).part("teacher_model")
    assert (part.pool, part.backend) == ("global_pool", "plain")


def test_nodes_of_their_own_are_a_pool(words):
    config = load_config("ppo_trainer", [*words, f"{D}.nnodes=1", f"{D}.n_gpus_per_node=2"])
    topology = Topology.of(config, added_roles(config))
    assert topology.pool_of("teacher_model").processes == (2,) and topology.runtime == "ray"
    assert topology.part("teacher_model").backend == "fsdp2"


def test_without_the_switch_its_settings_have_no_effect(words, capsys, caplog):
    load_config("ppo_trainer", [*words, f"{D}.enabled=false", f"{L}.topk=8"])
    assert f"{L}.topk: has no effect without {D}." in caplog.text
    assert not list(teachers_of(load_config("ppo_trainer", [*words, f"{D}.enabled=false"])))


@pytest.mark.parametrize(
    ("more", "key", "says"),
    [
        ([f"{T}.teacher_model.model_path=null"], f"{T}.teacher_model.model_path", "a teacher needs a model"),
        ([f"{T}.teacher_model.model_path=/no/such"], f"{T}.teacher_model.model_path", "no such model folder"),
        ([f"+{T}.math.modelpath=x"], f"{T}.math", "model_path"),
        ([f"{L}.loss_mode=k9"], f"{L}.loss_mode", "unknown value"),
        ([f"{L}.loss_mode=forward_kl_topk", f"{L}.topk=0"], f"{L}.topk", "1 or more"),
        ([f"{L}.loss_max_clamp=-1"], f"{L}.loss_max_clamp", "above 0"),
        ([f"{L}.log_prob_min_clamp=1"], f"{L}.log_prob_min_clamp", "below 0"),
        ([f"{L}.policy_loss_mode=vanila"], f"{L}.policy_loss_mode", "vanilla"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(words, more, key, says):
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [*words, *more])
    assert key in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["trainer.v1.trainer_mode=one_step_off", f"{L}.policy_loss_mode=gpg"], "no ratio to the policy that drew"),
        ([f"{L}.policy_loss_mode=dro"], "actor.policy_loss.dro_beta"),
        ([f"{L}.policy_loss_mode=bypass_mode"], "the loss of the bypass mode"),
        (["actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=3"], "ulysses_sequence_parallel_size"),
        (
            [
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10",
            ],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        ),
    ],
)
def test_what_a_teacher_or_its_policy_loss_cannot_run_by_is_refused(words, more, says):
    two = ["trainer.n_gpus_per_node=2", f"{L}.use_policy_gradient=true", f"{L}.loss_mode=k1"]
    assert says in refused(load_config, "ppo_trainer", [*words, *two, *more])


def test_a_run_without_a_teacher_names_the_setting(words):
    said = refused(load_config, "ppo_trainer", [word for word in words if not word.startswith(T)])
    assert f"{T}.teacher_model.model_path=FOLDER" in said


def test_two_teachers_for_the_same_rows_are_refused(words):
    path = next(word for word in words if "model_path" in word).partition("=")[2]
    with pytest.raises(ConfigError, match="several teachers serve the same rows"):
        load_config("ppo_trainer", [*words, f"+{T}.math.model_path={path}"])


def test_megatron_core_reads_several_tokens_per_position(words):
    of_roles = [f"actor_rollout_ref.{role}.strategy=megatron" for role in ("actor", "ref")]
    config = load_config("ppo_trainer", [*words, f"{L}.loss_mode=forward_kl_topk", *of_roles])
    assert config.actor_rollout_ref.actor.strategy == "megatron" and config.distillation.enabled


def test_a_loss_without_a_gradient_says_what_has_one(words, caplog):
    load_config("ppo_trainer", [*words, f"{L}.loss_mode=k1"])
    assert "the gradient of k1 is 0 on average" in caplog.text and f"{L}.use_policy_gradient=true" in caplog.text


def test_a_group_of_one_is_enough_where_no_reward_is_learned_from(words):
    n = "actor_rollout_ref.rollout.n"
    single = [*(word for word in words if not word.startswith(f"{n}=")), f"{n}=1"]
    load_config("ppo_trainer", [*single, f"{L}.use_task_rewards=false"])
    assert n in refused(load_config, "ppo_trainer", single)


ONE = f"{T}.teacher_model"
AT = (f"+{ONE}.inference.name=server", f"+{ONE}.inference.server.url=[http://a:1,http://b:1]")


@pytest.mark.parametrize("more", [(), (f"+{ONE}.num_replicas=1",)])
def test_a_teacher_of_another_engine_is_a_role_and_its_servers_have_no_effect(words, caplog, more):
    config = load_config("ppo_trainer", [*words, f"+{ONE}.inference.name=vllm", *more])
    assert [role.name for role in added_roles(config)] == ["teacher_model"]
    assert f"{ONE}.inference: has no effect: the teacher is a role" in caplog.text


@pytest.mark.parametrize("name", ["7", "a.b"])
def test_a_teacher_in_a_role_may_have_any_name(words, caplog, name):
    rest = [word for word in words if not word.startswith(T)]
    path = next(word for word in words if word.startswith(f"{ONE}.model_path=")).partition("=")[2]
    described = f"{{model_path: {path}, num_replicas: 1, inference: {{name: vllm}}}}"
    load_config("ppo_trainer", [*rest, f"{T}={{{name}: {described}}}"])
    assert ".num_replicas: has no effect: the teacher is a role" in caplog.text


@pytest.mark.parametrize("more", [AT, (f"+{ONE}.num_replicas=2",)])
def test_a_teacher_behind_servers_is_no_role(words, caplog, more):
    config = load_config("ppo_trainer", [*words, *more, f"{D}.nnodes=1", "actor_rollout_ref.ref.strategy=megatron",
                                         f"{L}.loss_mode=forward_kl_topk"])  # fmt: skip
    assert not added_roles(config) and [teacher.is_served for teacher in teachers_of(config)] == [True]
    assert f"{D}.nnodes: has no effect: every teacher is behind servers" in caplog.text
    assert f"{ONE}.inference" not in caplog.text


def test_a_policy_sampled_by_servers_leaves_its_teacher_in_a_role(words):
    config = load_config("ppo_trainer", [*words, "actor_rollout_ref.rollout.name=sglang"])
    assert [role.name for role in added_roles(config)] == ["teacher_model"]


def test_settings_that_servers_of_a_teacher_do_not_read_are_told(words, caplog):
    load_config("ppo_trainer", [*words, *AT, f"+{ONE}.inference.dtype=bfloat16"])
    assert f"{ONE}.inference.dtype: has no effect: it is set where the server is started" in caplog.text
    load_config("ppo_trainer", [*words, f"+{ONE}.num_replicas=1", f"+{ONE}.inference.top_p=0.5"])
    assert f"{ONE}.inference.top_p: has no effect: the servers of a teacher sample nothing" in caplog.text


def test_a_model_at_a_server_need_not_be_on_this_machine(words):
    away = [*(word for word in words if not word.startswith(f"{ONE}.model_path")), f"{ONE}.model_path=/at/the/server"]
    load_config("ppo_trainer", [*away, *AT])
    assert "no such model folder" in refused(load_config, "ppo_trainer", [*away, f"+{ONE}.num_replicas=1"])


@pytest.mark.parametrize(
    ("more", "key", "says"),
    [
        (["num_replicas=2", "inference.name=vllm"], "num_replicas", "inference.name=hf, for hosts of this library"),
        (["num_replicas=3", "inference.name=sglang"], "num_replicas", "Start them, and set"),
        (["num_replicas=-1"], "num_replicas", "0 or more"),
        (["inference=5"], "inference", "not the settings of servers"),
        (["inference.name=ollama"], "inference.name", "unknown value"),
        (["inference.name=server"], "inference.server.url", "needs its address"),
        (["inference.name=vllm", "inference.server.url=http://a:1"], "inference.name", "inference.name=server"),
        (["inference.name=server", "inference.server.url=http://a:1", "num_replicas=2"], "", "run already"),
        ([*AT, "inference.server.timeot=5"], "inference.server.timeot", "server.timeout"),
        ([*AT, "inference.server.api=openai"], "inference.server.api", "gives no log-probs of tokens"),
        ([*AT, "inference.server.timeout=0"], "inference.server.timeout", "above 0"),
        ([*AT, "inference.max_num_seqs=many"], "inference.max_num_seqs", "a whole number"),
    ],
)
def test_servers_that_cannot_score_are_refused_with_what_to_change(words, more, key, says):
    said = [word if word.startswith("+") else f"+{ONE}.{word}" for word in more]
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [*words, *said])
    assert f"{ONE}.{key}".rstrip(".") in str(caught.value) and says in str(caught.value)


def test_servers_that_score_at_temperature_1_alone_are_told_another(words):
    warm = [*words, *AT, "actor_rollout_ref.rollout.temperature=0.7"]
    load_config("ppo_trainer", warm)
    said = refused(load_config, "ppo_trainer", [*warm, f"+{ONE}.inference.server.api=vllm"])
    assert "actor_rollout_ref.rollout.temperature" in said and "servers of vllm give those at 1 alone" in said
