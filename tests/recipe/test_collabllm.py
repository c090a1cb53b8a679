"""CollabLLM: continuations with users of a script, the reward from them, users and judges on a server, a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from recipe.collabllm import metrics
from recipe.collabllm.loop import CUT_OFF, Conversation
from recipe.collabllm.main_collabllm import COLLABLLM, main
from recipe.collabllm.users import LanguageModelUser
from tests.harness import judges
from tests.harness.configs import changed
from tests.harness.conversations import Script, manager, rollout, rows, user_file
from tests.harness.models import tiny_tokenizer
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.runs import logged
from tests.harness.servers import serving
from verl.config import load_config
from verl.errors import ConfigError, RolloutError

A, R, HERE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "tests.recipe.test_collabllm"
ASK = [{"role": "user", "content": "Write."}]
ROW = {"reward_model": {"ground_truth": "42"}, "data_source": "openai/gsm8k"}
SEEN: list[Conversation] = []


def letters(conversation: Conversation, scale: float = 1.0) -> float:
    """The share of lower-case letters in the answers."""
    SEEN.append(conversation)
    text = "".join(conversation.answers())
    return scale * sum(c.islower() for c in text) / len(text)


async def length(conversation: Conversation) -> float:
    return float(conversation.tokens)


def fails(conversation: Conversation) -> float:
    raise ZeroDivisionError("a metric of mine")


def loops(folder: Path, **entry: Any) -> str:
    """The file of a loop whose metrics are functions of this module."""
    values = {"futures": 2, "metrics": {"letters": {"function": f"{HERE}:letters"}}, **entry}
    file = folder / "loops.yaml"
    file.write_text(json.dumps([{"name": "it", "_target_": "recipe.collabllm.loop.CollaborativeLoop", **values}]))
    return str(file)


def play(folder: Path, answers: list[Any], users: str | None = None, turns: int | None = 3, **entry: Any):
    """The batch of one row whose sampler and user follow scripts, and the requests."""
    SEEN.clear()
    tokenizer = tiny_tokenizer()
    script = Script([tokenizer(one, add_special_tokens=False)["input_ids"] if isinstance(one, str) else one
                     for one in answers])  # fmt: skip
    settings = rollout(
        agent__agent_loop_config_path=loops(folder, **entry),
        agent__default_agent_loop="it",
        multi_turn__interaction_config_path=users or user_file(folder, "ScriptedUser", texts=["More?", "And then?"]),
        multi_turn__max_assistant_turns=turns,
    )
    table = rows(ASK, interaction_kwargs=[{"name": "user"}])
    return manager(settings, script, tokenizer).generate_sequences(table), script, tokenizer


def score(batch: Any) -> float:
    return float(batch.batch["rm_scores"].sum())


def test_an_answer_is_worth_the_mean_of_two_conversations(tmp_path):
    """Answers ab; then 1c, d2 in one continuation and 345, 6 in the other: 4 and 2 letters of 6 characters."""
    batch, script, tokenizer = play(tmp_path, ["ab", "1c", "d2", "345", "6"])
    assert score(batch) == pytest.approx((4 / 6 + 2 / 6) / 2)
    assert tokenizer.decode(batch.batch["responses"][0]) == "ab" and batch.batch["response_mask"].sum() == 2
    first, second = SEEN
    messages = [(message["role"], message["content"]) for message in first.messages]
    assert messages == [("user", "Write."), ("assistant", "ab"), ("user", "More?"), ("assistant", "1c"),
                    ("user", "And then?"), ("assistant", "d2")]  # fmt: skip
    assert second.answers() == ["ab", "345", "6"] and (first.tokens, second.tokens) == (6, 6)
    prompts = [tokenizer.decode(list(request.token_ids)) for request in script.requests]
    assert len(prompts) == 5 and "ab" in prompts[1] and prompts[1].count("More?") == 1 and "1c" in prompts[2]
    assert prompts[3] == prompts[1], "the second continuation begins behind the answer, too"
    assert batch.meta_info["metrics"]["collabllm/letters"].value == pytest.approx(0.5)


def test_metrics_are_weighed_and_have_arguments(tmp_path):
    weighed = {
        "letters": {"function": f"{HERE}:letters", "scale": 10},
        "length": {"function": f"{HERE}:length", "weight": -0.5},
    }
    batch, *_ = play(tmp_path, ["ab", "12"], turns=2, futures=1, metrics=weighed)
    assert score(batch) == pytest.approx(10 * 2 / 4 - 0.5 * 4)


def test_a_user_ends_the_conversation(tmp_path):
    users = user_file(tmp_path, "ScriptedUser", texts=["More?"])
    play(tmp_path, ["ab", "cd", "ef"], users=users, turns=9, futures=1)
    assert SEEN[0].answers() == ["ab", "cd"]


@pytest.mark.parametrize("answer", [" ", ([70] * 3, "length")])
def test_an_empty_or_unfinished_answer_has_the_lowest_score(tmp_path, answer):
    batch, script, _ = play(tmp_path, [answer, "ab"])
    assert score(batch) == CUT_OFF == -1 and len(script.requests) == 1 and not SEEN
    assert batch.meta_info["metrics"]["collabllm/without_future"].value == 1


def test_an_answer_of_the_most_tokens_of_a_turn_is_played(tmp_path):
    batch, _, tokenizer = play(tmp_path, ["abcdef", "ghi"], turns=2, futures=1, max_tokens_per_turn=2)
    assert SEEN[0].answers() == ["ab", "gh"] and tokenizer.decode(batch.batch["responses"][0]) == "ab"


def test_a_conversation_ends_where_no_room_is_left(tmp_path):
    users = user_file(tmp_path, "ScriptedUser", texts=["x" * 900])
    play(tmp_path, ["ab", "cd"], users=users, futures=1)
    assert SEEN[0].answers() == ["ab"]


@pytest.mark.parametrize(("on_error", "masked"), [("mask", True), ("zero", False)])
def test_a_metric_that_fails_masks_the_row_or_scores_it(tmp_path, on_error, masked):
    entry = {"on_error": on_error, "metrics": {"fails": {"function": f"{HERE}:fails"}}}
    tokenizer = tiny_tokenizer()
    settings = rollout(
        agent__agent_loop_config_path=loops(tmp_path, **entry), agent__default_agent_loop="it",
        multi_turn__interaction_config_path=user_file(tmp_path, "ScriptedUser", texts=["More?"]),
        multi_turn__max_assistant_turns=2,
    )  # fmt: skip
    table = rows(ASK, ASK, interaction_kwargs=[{"name": "user"}] * 2)
    script = Script([tokenizer("ab", add_special_tokens=False)["input_ids"]],
                    of={"u1": [([70] * 3, "length")]})  # fmt: skip
    batch = manager(settings, script, tokenizer).generate_sequences(table)
    assert "a metric of mine" in batch.non_tensor_batch["agent_error"][0]
    assert (batch.non_tensor_batch["finish_reason"][0] == "abort") is masked
    assert batch.non_tensor_batch["reward_score"].tolist() == [0.0, -1.0]


def test_a_user_that_fails_is_not_an_answers_reward(tmp_path):
    with pytest.raises(RolloutError, match="the user is gone"):
        play(tmp_path, ["ab"], users=user_file(tmp_path, "FailingUser"))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"metrics": None}, "needs to know what to reward"),
        ({"futures": 0}, "futures"),
        ({"future": 1}, "unknown argument"),
        ({"metrics": {"a": {"weight": 1}}}, r"metrics\.a\.function"),
        ({"metrics": {"a": {"function": f"{HERE}:letters", "weight": "much"}}}, r"metrics\.a\.weight"),
        ({"turns": None}, "limit of turns"),
    ],
)
def test_entries_that_cannot_work_are_refused(tmp_path, entry, says):
    with pytest.raises(ConfigError, match=says):
        play(tmp_path, ["ab"], **entry)


def test_a_row_without_a_user_is_named(tmp_path):
    settings = rollout(agent__agent_loop_config_path=loops(tmp_path), agent__default_agent_loop="it",
                       multi_turn__max_assistant_turns=2)  # fmt: skip
    tokenizer = tiny_tokenizer()
    script = Script([tokenizer("ab", add_special_tokens=False)["input_ids"]])
    with pytest.raises(RolloutError, match="interaction_kwargs"):
        manager(settings, script, tokenizer).generate_sequences(rows(ASK))


def reply_of(config: dict, messages: list[dict], **kwargs) -> tuple:
    user = LanguageModelUser(config)
    return asyncio.run(user.generate_response("i", messages, **kwargs))


def test_a_user_on_a_server_knows_its_goal_and_the_conversation():
    def reply(payload: dict) -> tuple[int, dict]:
        prompt = judges.prompt(payload)
        assert "<goal>\nAn odd number.\n</goal>" in prompt
        assert "<conversation>\nuser: Hi\n\nassistant: Which one?\n</conversation>" in prompt
        return judges.reply("An odd one. " if payload["model"] == "user" else "Thanks. [END]")

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Which one?"}]
    with serving({judges.PATH: reply}) as server:
        first = reply_of({"address": server.url}, messages, goal="An odd number.")
        last = reply_of({"address": server.url, "model": "content"}, messages, goal="An odd number.")
    assert first == (False, "An odd one.", 0.0, {}) and last[0] is True
    with pytest.raises(ConfigError, match="goal"):
        reply_of({"address": "http://127.0.0.1:9"}, messages)


def test_the_recipes_metrics_read_answers_judge_and_tokens():
    def reply(payload: dict) -> tuple[int, dict]:
        assert judges.shown(payload, "question") == "6*7?"
        assert judges.shown(payload, "answer") == "assistant: Which?\n\nuser: All.\n\nassistant: #### 42"
        assert metrics.INTERACTIVE in judges.prompt(payload)
        return judges.reply("VERDICT: 7")

    messages = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "Which?"},
                {"role": "user", "content": "All."}, {"role": "assistant", "content": "#### 42"}]  # fmt: skip
    right = Conversation(messages, ROW, tokens=9)
    wrong = Conversation([*messages[:3], {"role": "assistant", "content": "#### 41"}], ROW, tokens=9)
    assert (metrics.accuracy(right), metrics.accuracy(wrong), metrics.token_amount(right)) == (1.0, 0.0, 9.0)
    with serving({judges.PATH: reply}) as server:
        assert asyncio.run(metrics.interactivity(right, server.url)) == pytest.approx(0.7)
    metrics.clients.cache_clear()


REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=4", "data.max_prompt_length=64",
            "data.max_response_length=96", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            f"{R}.n=2")  # fmt: skip


def test_the_files_of_the_recipe_are_accepted(lower_case_task: Path):
    config = load_config("ppo_trainer", changed(COLLABLLM, *REQUIRED))
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 3


def test_a_run_is_paid_by_conversations(lower_case_task: Path):
    talks = addition_rows(8)
    for row in talks:
        row["extra_info"]["interaction_kwargs"] = {"name": "user"}
    write_prompts("train.jsonl", talks)
    loops(lower_case_task, max_tokens_per_turn=6)
    users = [{"name": "user", "class_name": "recipe.collabllm.users.PlainUser", "config": {}}]
    Path("users.yaml").write_text(json.dumps({"interaction": users}))
    more = [f"{R}.agent.agent_loop_config_path=loops.yaml", f"{R}.agent.default_agent_loop=it",
            f"{R}.multi_turn.interaction_config_path=users.yaml", "trainer.total_training_steps=2",
            "trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.experiment_name=talks"]  # fmt: skip
    SEEN.clear()
    assert main([*REQUIRED, *more]) == 0
    steps = logged("logs/verl-collabllm", "talks")
    assert len(SEEN) == 32 and {len(conversation.answers()) for conversation in SEEN} == {3}
    means = [sum(map(letters, SEEN[n : n + 16])) / 16 for n in (0, 16)]
    assert [step["critic/score/mean"] for step in steps] == pytest.approx(means, abs=1e-5)
