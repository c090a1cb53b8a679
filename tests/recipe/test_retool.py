"""The ReTool recipe: a model's code runs in the sandbox, its output is a masked observation, and the answer pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipe.retool.main_retool import HERE, RETOOL
from recipe.retool.reward import compute_score
from tests.harness.conversations import Script, manager, rollout, rows
from tests.harness.models import tiny_model_dir, tiny_tokenizer
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.rewards import RewardFunction, RewardSample, Scorer, load_reward_function
from verl.sandbox import Pool, SandboxRefused
from verl.tools.loading import load_tools

QUESTION = "What is the sum of all primes below 100? Put the answer into \\boxed{}."
CODE = "print(sum(n for n in range(2, 100) if all(n % d for d in range(2, n))))"
ANSWER = "The program printed the sum, so it is \\boxed{1060}."


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """The recipe's tool file; on a machine without namespaces, with the concession that such a machine needs."""
    with Pool(1) as pool:
        try:
            pool.prepare()
            return str(HERE / "tools.yaml")
        except SandboxRefused:
            text = (HERE / "tools.yaml").read_text(encoding="utf-8")
            path = tmp_path / "tools.yaml"
            path.write_text(text.replace("type: native", "type: native\n      allow_missing: [namespaces]"))
            return str(path)


def call(code: str) -> str:
    arguments = {"name": "code_interpreter", "arguments": {"code": code}}
    return f"I compute it.\n<tool_call>\n{json.dumps(arguments)}\n</tool_call><|im_end|>"


def reward_of(text: str, turns: int) -> dict:
    """The reward as a run computes it: the recipe's file, loaded and called by the library."""
    function: RewardFunction = load_reward_function(str(HERE / "reward.py"))
    scorer = Scorer(function)
    (result,) = scorer.score([RewardSample("math_dapo", text, "1060", {"num_turns": turns})])
    scorer.close()
    assert result.failure is None, result.failure
    return {"score": result.score, **result.extra}


def play(tools: str, *texts: str):
    """The batch of a model that says these texts, and its response."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    settings = rollout(multi_turn__enable=True, multi_turn__tool_config_path=tools, response_length=2000)
    batch = manager(settings, Script(ids), tokenizer).generate_sequences(rows([{"role": "user", "content": QUESTION}]))
    return batch, tokenizer


def test_prompt_code_masked_output_answer_reward(tools: str):
    batch, tokenizer = play(tools, call(CODE), ANSWER + "<|im_end|>")
    response, mask = batch.batch["responses"][0], batch.batch["response_mask"][0].bool()
    text = tokenizer.decode(response)
    assert "<|im_start|>tool\n1060<|im_end|>" in text
    trained = tokenizer.decode(response[mask])
    assert trained == call(CODE) + ANSWER + "<|im_end|>"
    assert tokenizer.decode(response[~mask]) == "\n<|im_start|>tool\n1060<|im_end|>\n<|im_start|>assistant\n"
    turns = int(batch.non_tensor_batch["__num_turns__"][0])
    assert turns == 4
    reward = reward_of(text, turns)
    assert (reward["score"], reward["acc"], reward["calls"]) == (1.0, True, 1.0)


def test_a_program_that_fails_is_seen_by_the_model_which_can_try_again(tools: str):
    batch, tokenizer = play(tools, call("1 / 0"), call("print(open('/etc/passwd').read())"), call(CODE), ANSWER)
    text = tokenizer.decode(batch.batch["responses"][0])
    assert "ZeroDivisionError: division by zero" in text
    assert "Error" in text.split("/etc/passwd')", 1)[1].split("<|im_end|>")[1] and "root:" not in text
    assert "\n1060<|im_end|>" in text and text.endswith(ANSWER)
    assert reward_of(text, int(batch.non_tensor_batch["__num_turns__"][0]))["score"] == 1.0


def test_the_output_of_a_program_alone_is_not_an_answer(tools: str):
    """The box that a program prints is an observation; here the model itself gives no answer after it."""
    batch, tokenizer = play(tools, call("print('1060')"), "I do not know.<|im_end|>")
    assert reward_of(tokenizer.decode(batch.batch["responses"][0]), 4)["score"] < 0


@pytest.mark.parametrize(
    ("answer", "turns", "score"),
    [
        ("1060", 2, 1.0),
        ("1060", 8, 1.0),
        ("7", 2, -1.0),
        ("7", 4, -0.9),
        ("7", 8, -0.7),
        ("7", 16, -0.6),
        ("7", None, -1.0),
    ],
)
def test_calls_make_a_wrong_answer_less_wrong_and_a_right_one_no_better(answer: str, turns: int | None, score: float):
    found = compute_score("math", f"It is \\boxed{{{answer}}}", "1060", {"num_turns": turns})
    assert found["score"] == pytest.approx(score, abs=1e-12) and found["acc"] is (answer == "1060")
    alone = compute_score("math", f"It is \\boxed{{{answer}}}", "1060", {"num_turns": turns}, call_bonus=0.0)
    assert alone["score"] == (1.0 if answer == "1060" else -1.0)


def test_the_settings_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_prompts(Path("train.jsonl"), 4)
    tiny_model_dir("model")
    required = ["data.train_files=train.jsonl", "data.train_batch_size=4", "actor_rollout_ref.model.path=model",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]  # fmt: skip
    config = load_config("ppo_trainer", [*RETOOL, *required])
    assert config.actor_rollout_ref.rollout.multi_turn.enable and config.actor_rollout_ref.rollout.n == 2
    assert config.reward.custom_reward_function.path == str(HERE / "reward.py")


def test_the_recipes_tool_file_loads(tools: str):
    (tool,) = load_tools(tools).values()
    assert tool.name == "code_interpreter"


def test_masks_and_log_probs_cover_the_model_alone(tools: str):
    batch, _ = play(tools, call(CODE), ANSWER)
    mask = batch.batch["response_mask"][0]
    if "rollout_log_probs" in batch.batch:
        assert torch.all(batch.batch["rollout_log_probs"][0][mask == 0] == 0)
    assert 0 < int(mask.sum()) < mask.numel()
