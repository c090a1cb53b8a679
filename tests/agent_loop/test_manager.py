"""The manager with a sampler that answers from a table: layout of the batch, keys of the requests, failures."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.agent_loop.server import scripted
from tests.harness.models import tiny_tokenizer
from tests.harness.rows import columns
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register
from verl.agent_loop.batch import to_batch
from verl.agent_loop.client import SamplerClient, within_response
from verl.agent_loop.failed import RunStops
from verl.errors import ConfigError, DataError, RolloutError
from verl.metrics import Metric, MetricSet, notices
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request
from verl.rollout.lost import EngineLostError


class Table:
    """Answers a prompt with its first token counted down: [3] -> 3, 2, 1; keeps what it was asked."""

    def __init__(self):
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        tokens = tuple(range(request.token_ids[0], 0, -1))
        return Completion(request.id, tokens, tuple(-0.5 * t for t in tokens), "stop", (4,) * len(tokens))


def settings(**changes):
    return scripted.settings(**{"top_p": 0.9, "response_length": 8, **changes})


def manager(sampler, **changes) -> AgentLoopManager:
    return AgentLoopManager(settings(), sampler, SimpleNamespace(pad_token_id=0, eos_token_id=9), **changes)


def prompts(ids: list[list[int]], uids: list[str], **more) -> DataProto:
    return DataProto.from_dict(non_tensors=columns(raw_prompt_ids=ids, uid=uids, **more))


def test_further_values_of_a_loop_replace_no_column_of_the_run():
    extra = {"finish_reason": "stop", "__num_turns__": 0, "unscorable": True, "responses": [8], "turns": 3}
    cut = AgentLoopOutput([3], [1, 2], [1, 1], num_turns=2, finish_reason="length", extra_fields=extra)
    batch = to_batch([cut], pad_token_id=0)
    columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    assert columns == {
        "finish_reason": ["length"],
        "__num_turns__": [2],
        "turns": [3],
        **{f"loop_{name}": [extra[name]] for name in ("finish_reason", "__num_turns__", "unscorable", "responses")},
    }
    assert batch.batch["responses"].tolist() == [[1, 2]]
    message = notices()["AgentLoopOutput.extra_fields, key 'finish_reason'"]
    assert message.startswith("-> 'loop_finish_reason': a column of that name is the run's")


def test_the_batch_is_padded_to_its_longest_rows_on_the_right_sides():
    batch = manager(Table()).generate_sequences(prompts([[3], [1, 7]], ["a", "b"]))
    assert batch.batch["prompts"].tolist() == [[0, 3], [1, 7]]
    assert batch.batch["responses"].tolist() == [[3, 2, 1], [1, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.batch["input_ids"].tolist() == [[0, 3, 3, 2, 1], [1, 7, 1, 0, 0]]
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]
    torch.testing.assert_close(
        batch.batch["rollout_log_probs"], torch.tensor([[-1.5, -1.0, -0.5], [-0.5, 0.0, 0.0]]), atol=0, rtol=0
    )
    assert batch.batch["token_versions"].tolist() == [[4, 4, 4], [4, -1, -1]]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop"]
    assert batch.meta_info["pad_token_id"] == 0


def test_samples_of_one_prompt_are_told_apart_by_their_order():
    sampler = Table()
    manager(sampler).generate_sequences(prompts([[2], [2], [5]], ["a", "a", "b"]))
    assert [(r.uid, r.sample_index, r.sampling.seed) for r in sampler.requests] == [
        ("a", 0, 42),
        ("a", 1, 42),
        ("b", 0, 42),
    ]


def test_validation_samples_with_its_own_settings():
    sampler = Table()
    rows = prompts([[2]], ["a"])
    loops = manager(sampler)
    loops.generate_sequences(rows)
    rows.meta_info["validate"] = True
    loops.generate_sequences(rows)
    train, val = (r.sampling for r in sampler.requests)
    assert (train.temperature, train.top_p, train.do_sample, train.max_tokens) == (0.7, 0.9, True, 8)
    assert (val.temperature, val.top_p, val.do_sample, val.max_tokens) == (0.0, 1.0, False, 8)


def test_a_shortest_response_and_a_penalty_reach_every_request_and_earlier_turns_count():
    sampler = Table()
    loops = AgentLoopManager(
        settings(repetition_penalty=1.2), sampler, SimpleNamespace(pad_token_id=0, eos_token_id=9),
        data_config={"min_response_length": 6},
    )  # fmt: skip
    loops.generate_sequences(prompts([[2]], ["a"]))
    (asked,) = (request.sampling for request in sampler.requests)
    assert (asked.min_tokens, asked.repetition_penalty) == (6, 1.2)
    parameters = loops.sampling_params({"validate": True})
    assert within_response(parameters, 4)["min_tokens"] == 2 and within_response(parameters, 7)["min_tokens"] == 0
    client = SamplerClient(sampler, "a", 0, 42, 8)
    asyncio.run(client.generate("x", prompt_ids=[2], sampling_params={**parameters, "max_tokens": 5}))
    assert sampler.requests[-1].sampling.min_tokens == 5, "no room for more"


@register("two turns")
class TwoTurns(AgentLoopBase):
    """Samples, inserts token 6, samples again."""

    async def run(self, sampling_params, **row):
        prompt = await self.prompt_ids(row)
        first = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
        second = await self.server_manager.generate("x", prompt_ids=[1], sampling_params=sampling_params)
        n, m = len(first.token_ids), len(second.token_ids)
        return AgentLoopOutput(
            prompt, [*first.token_ids, 6, *second.token_ids], [1] * n + [0] + [1] * m, extra_fields={"turns": 2}
        )


def test_a_row_picks_its_loop_by_name_and_later_turns_have_keys_of_their_own():
    sampler = Table()
    rows = prompts([[2], [2]], ["a", "b"], agent_name=["two turns", None])
    batch = manager(sampler).generate_sequences(rows)
    assert batch.batch["responses"].tolist() == [[2, 1, 6, 1], [2, 1, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 1, 0, 0]]
    assert batch.non_tensor_batch["turns"].tolist() == [2, None]
    assert "rollout_log_probs" not in batch.batch.keys(), "one loop returned none"
    assert {r.uid for r in sampler.requests} == {"a", "a/1", "b"}


@register("failing")
class Failing(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise row.get("fault") or ZeroDivisionError("a bug of mine")


FAULTS = [
    ZeroDivisionError("x"),
    RecursionError("deep"),
    DataError("a bad row"),
    RolloutError("refused"),
    MemoryError(),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_loop_that_raises_costs_its_own_row_which_is_masked_counted_and_shown(fault):
    rows = prompts([[2], [3], [1]], ["a", "b", "c"], agent_name=[None, "failing", None], fault=[None, fault, None])
    batch = manager(Table()).generate_sequences(rows)
    assert batch.batch["responses"].tolist() == [[2, 1], [0, 0], [1, 0]]
    assert batch.batch["prompts"].tolist() == [[2], [3], [1]]
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 0, 1]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "abort", "stop"]
    assert batch.meta_info["metrics"]["rollout/agent/failed"].value == 1
    assert "row 1 of the batch, uid b" in batch.non_tensor_batch["agent_error"][1]
    (told,) = (text for who, text in notices().items() if "failing" in who)
    assert "row 1 of the batch, uid b" in told and str(fault) in told


def test_the_line_of_a_users_loop_is_shown_and_if_every_row_fails_the_run_stops_with_its_exception():
    with pytest.raises(RolloutError, match=r"all 2 rollouts.*row 0.*a bug of mine \(.*test_manager.py, line") as caught:
        manager(Table()).generate_sequences(prompts([[2], [2]], ["a", "b"], agent_name=["failing"] * 2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("fault", [EngineLostError("gone"), ConfigError("a wrong setting"), RunStops("stop")])
def test_what_every_row_would_have_stops_the_run(fault):
    """At once, also where a group that fails alone would be sampled once more; a lost sampler may be replaced."""
    extra = [None, {"index": 7}]
    rows = prompts([[2], [2]], ["a", "b"], agent_name=[None, "failing"], fault=[None, fault], extra_info=extra)
    with pytest.raises(RolloutError, match=r"failing.*row 1.*uid b, extra_info.index 7") as caught:
        manager(Table()).generate_sequences(rows)
    assert caught.value.__cause__ is fault
    assert isinstance(caught.value, RunStops) is not isinstance(fault, EngineLostError)


@pytest.mark.parametrize("name", ["os:system", "tests.agent_loop.planted:Loop", "tests.agent_loop.planted.Loop", "a.b"])
def test_a_rows_agent_name_imports_nothing(name):
    with pytest.raises(ConfigError, match=r"agent_name: unknown agent loop.*A row imports no code"):
        manager(Table()).generate_sequences(prompts([[2]], ["a"], agent_name=[name]))
    assert "tests.agent_loop.planted" not in sys.modules


def test_the_configured_default_may_be_a_dotted_path_and_a_row_may_repeat_it():
    path = f"{__name__}:TwoTurns"
    agent = SimpleNamespace(default_agent_loop=path, agent_loop_config_path=None)
    loops = AgentLoopManager(settings(agent=agent), Table(), SimpleNamespace(pad_token_id=0, eos_token_id=9))
    batch = loops.generate_sequences(prompts([[2], [2]], ["a", "b"], agent_name=[path, None]))
    assert batch.non_tensor_batch["turns"].tolist() == [2, 2]


def test_a_trajectory_is_scored_as_soon_as_it_ends():
    async def score(row, output):
        return float(len(output.response_ids))

    here = manager(Table(), score=score)
    with pytest.raises(RolloutError, match=r"only in this process.*score_row"):
        here.run_in([here.here])
    batch = here.generate_sequences(prompts([[3], [1]], ["a", "b"]))
    assert batch.non_tensor_batch["reward_score"].tolist() == [3.0, 1.0]


async def test_it_works_inside_a_running_event_loop_too():
    assert manager(Table()).generate_sequences(prompts([[2]], ["a"])).batch["responses"].tolist() == [[2, 1]]


def test_an_unknown_sampling_parameter_is_refused_with_the_nearest_name():
    class Wrong(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return await self.server_manager.generate("x", prompt_ids=[1], sampling_params={"temprature": 1.0})

    loops = manager(Table())
    client_loop = Wrong(loops.config, None, None)
    from verl.agent_loop import SamplerClient

    client_loop.server_manager = SamplerClient(Table(), "a", 0, 0, 8)
    with pytest.raises(RolloutError, match="temperature"):
        asyncio.run(client_loop.run({}))


@register("overlong")
class Overlong(AgentLoopBase):
    """More tokens than the budget of 8, the last ones from a tool."""

    async def run(self, sampling_params, **row):
        return AgentLoopOutput(
            [1], list(range(10, 22)), [1] * 9 + [0] * 3, response_logprobs=[-1.0] * 12, metrics={"tool_calls": 0.5}
        )


def test_a_response_beyond_the_budget_is_cut_and_says_so():
    batch = manager(Table()).generate_sequences(prompts([[3]], ["a"], agent_name=["overlong"]))
    assert batch.batch["responses"].tolist() == [list(range(10, 18))]
    assert batch.batch["rollout_log_probs"].shape == (1, 8)
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length"]
    assert batch.meta_info["metrics"]["timing_s/agent_loop/tool_calls/max"].value == 0.5


@register("uneven")
class Uneven(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return AgentLoopOutput([1], [1, 2], [1], num_turns=2)


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(RolloutError, match=r"row 0.*response_mask.*Got 1.*Allowed: 2"):
        manager(Table()).generate_sequences(prompts([[3]], ["a"], agent_name=["uneven"]))


def test_the_tokenizers_end_token_and_the_runs_seed_reach_every_request():
    sampler = Table()
    loops = manager(sampler)
    loops.generate_sequences(prompts([[2]], ["a"]))
    assert sampler.requests[0].sampling.stop_token_ids == (9,)
    rows = prompts([[2]], ["a"])
    rows.meta_info["do_sample"] = False
    loops.generate_sequences(rows)
    assert sampler.requests[1].sampling.is_greedy


def test_rows_that_would_draw_the_same_numbers_are_refused():
    sampler = Table()
    loops = manager(sampler)
    loops.generate_sequences(prompts([[2], [2]], ["a", "a"], sample_index=[3, 1]))
    assert [r.sample_index for r in sampler.requests] == [3, 1]
    with pytest.raises(RolloutError, match="sample_index: two rows of uid a"):
        loops.generate_sequences(prompts([[2], [2]], ["a", "a"], sample_index=[1, 1]))


def test_rows_without_a_uid_are_told_apart_by_place_and_step():
    sampler = Table()
    loops = manager(sampler)
    for step in (1, 2):
        rows = prompts([[2], [2]], ["a", "a"])
        del rows.non_tensor_batch["uid"]
        rows.meta_info["global_steps"] = step
        loops.generate_sequences(rows)
    assert len({(r.uid, r.sample_index) for r in sampler.requests}) == 4


def test_scores_lie_on_the_last_sampled_token():
    async def score(row, output):
        return {"a": 2.0, "b": -1.0}[row["uid"]]

    rows = prompts([[3], [2]], ["a", "b"], agent_name=[None, "overlong"])
    scores = manager(Table(), score=score).generate_sequences(rows).batch["rm_scores"]
    assert scores.tolist() == [[0, 0, 2, 0, 0, 0, 0, 0], [0] * 7 + [-1]]


def test_log_probs_are_left_out_where_the_run_does_not_want_them():
    loops = AgentLoopManager(
        settings(calculate_log_probs=False), Table(), SimpleNamespace(pad_token_id=None, eos_token_id=None)
    )
    batch = loops.generate_sequences(prompts([[2], [1]], ["a", "b"]))
    assert "rollout_log_probs" not in batch.batch.keys()
    assert batch.batch["responses"].tolist() == [[2, 1], [1, 0]], "without a padding token the batch is padded with 0"


def test_messages_are_templated_where_the_data_set_did_not_and_special_tokens_in_them_are_text():
    tokenizer = tiny_tokenizer()
    rows = prompts([None], ["a"], raw_prompt=[[{"role": "user", "content": "hi<|im_end|>"}]])
    ids = AgentLoopManager(settings(), Table(), tokenizer).generate_sequences(rows).batch["prompts"][0].tolist()
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.eos_token_id) == 1


def test_one_failure_ends_the_batch_and_what_it_holds():
    class Slow(Table):
        cancelled = 0

        async def generate(self, request):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    sampler = Slow()
    rows = prompts(
        [[2], [2], [2]], ["a", "b", "c"], agent_name=[None, "failing", None], fault=[None, RunStops("x"), None]
    )
    with pytest.raises(RolloutError, match="row 1"):
        manager(sampler).generate_sequences(rows)
    assert sampler.cancelled == 2


def test_the_real_sampler_behind_the_real_loop_reports_what_a_forward_pass_finds():
    from tests.harness.samplers import EOS, tiny_model
    from verl.rollout.hf.sampler import HFSampler

    model = tiny_model()
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=EOS)
    loops = AgentLoopManager(settings(top_p=1.0), HFSampler(model), tokenizer)
    rows = prompts([[7, 8, 9]] * 4 + [[6]] * 4, ["a"] * 4 + ["b"] * 4)
    found = loops.generate_sequences(rows).batch
    width, mask = found["prompts"].shape[1], found["response_mask"].bool()
    with torch.no_grad():
        logits = model(
            input_ids=found["input_ids"], attention_mask=found["attention_mask"], position_ids=found["position_ids"]
        ).logits
    logs = (logits[:, width - 1 : -1] / 0.7).log_softmax(-1).gather(-1, found["responses"][:, :, None])[..., 0]
    torch.testing.assert_close(found["rollout_log_probs"][mask], logs[mask], atol=2e-5, rtol=0)
    assert len({tuple(r) for r in found["responses"].tolist()}) > 4, "samples of one prompt differ"
    ends = (found["responses"] == EOS) & mask
    assert bool((ends.sum(-1) <= 1).all()), "nothing is sampled after the end token"
    assert found["token_versions"][mask].eq(0).all() and found["token_versions"][~mask].eq(-1).all()


def test_upstreams_manager_is_made_from_the_whole_configuration(tmp_path):
    from tests.harness.models import tiny_model_dir
    from tests.harness.rows import write_prompts
    from verl.config import load_config
    from verl.errors import NotBuiltError
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager as Upstreams
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    model = tiny_model_dir(tmp_path / "model")
    data = write_prompts(tmp_path / "train.parquet")
    settings = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", "data.max_response_length=4"]
    config = load_config("ppo_trainer", settings)
    for made in (Upstreams(config, Table()), AgentLoopWorker(config=config, llm_client=Table())):
        batch = made.generate_sequences(prompts([[3]], ["a"]))
        assert batch.batch["responses"].tolist() == [[3, 2, 1]]
    with pytest.raises(NotBuiltError, match="teacher_client"):
        Upstreams(config, Table(), teacher_client=object())


class Several(AgentLoopBase):
    """Returns what the row's column says."""

    async def run(self, sampling_params, **row):
        return row["made"]


def test_the_last_trajectory_is_the_row_and_has_the_earlier_ones():
    register("several")(Several)
    first = AgentLoopOutput([3], [2, 1], [1, 1], [-1.0, -1.0], token_versions=[4, 4])
    last = AgentLoopOutput([1], [5], [1], [-2.0], token_versions=[4], reward_score=0.5)
    loops = {"agent_name": ["several"] * 2, "made": [[first, last], [last]]}
    batch = manager(Table()).generate_sequences(prompts([[3], [3]], ["a", "b"], **loops))
    assert batch.batch["responses"].tolist() == [[5], [5]] and batch.batch["rm_scores"].tolist() == [[0.5], [0.5]]
    before, none = batch.non_tensor_batch["trajectories_before"]
    assert [(one["prompt_ids"], one["response_ids"], one["response_logprobs"]) for one in before] == [
        ([3], [2, 1], [-1.0, -1.0])
    ]
    assert none is None and batch.meta_info["metrics"]["rollout/sampled_tokens"].value == 4.0


def trajectory(ids=(1,), mask=None, log_probs=True, **more):
    mask = [1] * len(ids) if mask is None else mask
    return AgentLoopOutput([3], list(ids), mask, [-1.0] * len(ids) if log_probs else None, **more)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "the loop returned no trajectory. Got []"),
        ("text", "the loop returned no trajectory. Got 'str'"),
        (None, "the loop returned no trajectory. Got 'NoneType'"),
        ([trajectory(), None], "Got ['AgentLoopOutput', 'NoneType']"),
        ([trajectory(log_probs=False), trajectory()], "trajectory 0 of 2 has none, another one has"),
        ([trajectory(), trajectory(log_probs=False)], "the last trajectory has none, another one has"),
        ([trajectory(reward_score=1.0), trajectory()], "has what belongs to the sample"),
        ([AgentLoopOutput([], [1], [1]), trajectory()], "empty prompt"),
    ],
)
def test_trajectories_that_cannot_share_a_score_mask_their_sample(made, message):
    register("several")(Several)
    good = [trajectory(reward_score=1.0)]
    loops = {"agent_name": ["several"] * 2, "made": [made, good]}
    batch = manager(Table()).generate_sequences(prompts([[3], [3]], ["a", "b"], **loops))
    columns = batch.non_tensor_batch
    assert columns["finish_reason"].tolist() == ["abort", "stop"] and "trajectories_before" not in columns
    assert message in columns["agent_error"][0] and columns["agent_error"][1] is None
    assert batch.meta_info["metrics"]["rollout/agent/failed"].value == 1.0


@pytest.mark.parametrize("made", [[trajectory() for _ in range(65)], [trajectory([1] * 8) for _ in range(9)]])
def test_of_too_many_trajectories_the_last_alone_is_scored_and_trained_on(made):
    register("several")(Several)
    made[-1].reward_score = -1.0
    most = [trajectory() for _ in range(63)] + [trajectory(reward_score=0.5)]
    loops = {"agent_name": ["several"] * 2, "made": [made, most]}
    batch = manager(Table()).generate_sequences(prompts([[3], [3]], ["a", "b"], **loops))
    columns, metrics = batch.non_tensor_batch, batch.meta_info["metrics"]
    assert columns["finish_reason"].tolist() == ["stop", "stop"] and columns["reward_score"].tolist() == [-1.0, 0.5]
    assert [0 if before is None else len(before) for before in columns["trajectories_before"]] == [0, 63]
    assert metrics["rollout/agent/dropped_tokens"].value == 64.0, "of 64 with one token, or of 8 with eight"
    assert any(f"{len(made)} trajectories with" in text and "more than 64" in text for text in notices().values())


def test_too_many_trajectories_end_a_run_that_stops_on_errors(tmp_path):
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: strict, _target_: {__name__}.Several, on_error: raise}}")
    agent = SimpleNamespace(default_agent_loop="strict", agent_loop_config_path=str(file))
    strict = AgentLoopManager(settings(agent=agent), Table(), SimpleNamespace(pad_token_id=0, eos_token_id=9))
    with pytest.raises(RolloutError, match="65 trajectories"):
        strict.generate_sequences(prompts([[3]], ["a"], made=[[trajectory() for _ in range(65)]]))


def test_the_score_of_a_trajectory_without_tokens_is_on_the_one_before():
    register("several")(Several)
    end = trajectory([7], mask=[0], reward_score=-1.0, extra_fields={"tool": "t"}, finish_reason="length")
    empty = trajectory([], metrics={"num_preempted": 2})
    made = [trajectory([1, 2], metrics={"num_preempted": 1}), empty, trajectory([3]), end]
    loops = {"agent_name": ["several"] * 2, "made": [made, [trajectory(reward_score=1.0)]]}
    batch = manager(Table()).generate_sequences(prompts([[3], [3]], ["a", "b"], **loops))
    columns = batch.non_tensor_batch
    assert batch.batch["responses"].tolist() == [[3], [1]] and batch.batch["rm_scores"].tolist() == [[-1.0], [1.0]]
    assert columns["tool"].tolist() == ["t", None] and columns["finish_reason"].tolist() == ["length", "stop"]
    assert [one["response_ids"] for one in columns["trajectories_before"][0]] == [[1, 2]]
    assert batch.meta_info["metrics"]["timing_s/agent_loop/num_preempted/max"].value == 3.0


def test_what_trajectories_share_counts_once_and_is_left_as_it_is():
    register("several")(Several)
    shared = MetricSet({"calls": Metric(3.0, "sum")})
    first = trajectory([1, 2], measures=shared, metrics={"tool_calls": 2.0})
    made = [first, replace(first, response_ids=[4, 5]), trajectory(measures=MetricSet({"calls": Metric(1.0, "sum")}))]
    loops = {"agent_name": ["several"], "made": [made]}
    metrics = manager(Table()).generate_sequences(prompts([[3]], ["a"], **loops)).meta_info["metrics"]
    assert metrics["calls"].value == 4.0 and metrics["timing_s/agent_loop/tool_calls/max"].value == 2.0
    assert shared.values() == {"calls": 3.0} and made[-1].measures.values() == {"calls": 1.0}
    assert first.metrics.tool_calls == 2.0 and made[-1].metrics.tool_calls == 0.0


def test_rewards_of_steps_without_a_sampled_token_are_refused():
    register("several")(Several)
    end = trajectory([7], mask=[0], reward_score=1.0, step_rewards=[(0, 1.0)], num_turns=5)
    whole = trajectory([7], mask=[0], reward_score=1.0, num_turns=5)
    loops = {"agent_name": ["several"] * 2, "made": [[trajectory(), end], [trajectory(num_turns=2), whole]]}
    columns = manager(Table()).generate_sequences(prompts([[3]] * 2, ["a", "b"], **loops)).non_tensor_batch
    assert "step_rewards: the last trajectory has no sampled token" in columns["agent_error"][0]
    assert columns["agent_error"][1] is None and columns["__num_turns__"].tolist()[1] == 5


def test_a_trajectory_with_a_long_prompt_costs_its_sample_alone():
    register("several")(Several)
    long = [4] * 407  # a prompt may have 400 tokens, and with its response 408
    made = [trajectory([1, 2]), AgentLoopOutput(long, [5, 6, 7], [1] * 3, [-1.0] * 3, reward_score=-1.0)]
    longer = AgentLoopOutput([4] * 409, [5], [1], [-1.0], reward_score=-1.0)
    nothing = [AgentLoopOutput([4] * 409, [5], [1], [-1.0]), longer]
    loops = {"agent_name": ["several"] * 3, "made": [made, [trajectory([1, 2]), longer], nothing]}
    batch = manager(Table()).generate_sequences(prompts([[3]] * 3, ["a", "b", "c"], **loops))
    assert batch.batch["responses"].tolist() == [[5, 0], [1, 2], [0, 0]] and batch.batch["prompts"].shape == (3, 408)
    assert batch.batch["rm_scores"].tolist() == [[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length"] * 3
    assert any("returned trajectory 1 of 2 with 410 tokens" in text for text in notices().values())


def test_a_sample_of_which_one_trajectory_was_given_up_is_given_up():
    register("several")(Several)
    made = [trajectory(finish_reason="abort"), trajectory()]
    loops = {"agent_name": ["several"] * 2, "made": [made, [trajectory()]]}
    batch = manager(Table()).generate_sequences(prompts([[3], [3]], ["a", "b"], **loops))
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["abort", "stop"]
