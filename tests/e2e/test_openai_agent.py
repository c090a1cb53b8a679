"""An existing agent, unchanged but for its base_url, trains the model that it talks to."""

from __future__ import annotations

import pytest

from tests.harness import programs
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.runs import records

AGENT = '''
"""An agent as one might have it already: the stock client, two calls, a judgement of its own."""

{imported}


def agent(base_url, api_key, row):
    client = {client}(base_url=base_url, api_key=api_key)
    messages = [{{"role": "user", "content": "say it"}}]
    answers = []
    for _ in range(2):
        {call}
        answers.append(text)
        messages += [answer, {{"role": "user", "content": "again"}}]
    return {{"score": sum(text.isascii() and text.isalpha() for text in answers) / 2, "said": answers}}
'''
CLIENTS = {
    "chat": (
        "OpenAI",
        'answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=1).choices[0].message',
        'text = answer.content or ""',
    ),
    "responses": (
        "OpenAI",
        'text = client.responses.create(model="policy", input=messages, max_output_tokens=1).output_text',
        'answer = {"role": "assistant", "content": text}',
    ),
    "messages": (
        "Anthropic",
        'text = client.messages.create(model="policy", messages=messages, max_tokens=1).content[0].text',
        'answer = {"role": "assistant", "content": text}',
    ),
}
"""Form of the endpoint -> the stock client, its call, and the answer as a message and as text."""
LOOPS = "- {name: mine, _target_: verl.agent_loop.server.loop.OpenAIAgentLoop, agent: agent.py, timeout: 120}\n"

SETTINGS = [
    "data.train_files=train.parquet",
    "data.train_batch_size=2",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=0.03",
    "trainer.logger=[file]",
    "trainer.project_name=agents",
    "trainer.resume_mode=disable",
]


@pytest.mark.slow
@pytest.mark.parametrize("form", CLIENTS)
def test_a_stock_client_drives_training_and_its_tokens_are_in_the_batch(tmp_path, form):
    client, *call = CLIENTS[form]
    imported = f"from {client.lower()} import {client}"
    tiny_model_dir(tmp_path / "model")
    write_prompts(tmp_path / "train.parquet", 8)
    (tmp_path / "agent.py").write_text(AGENT.format(imported=imported, client=client, call="\n        ".join(call)))
    (tmp_path / "loops.yaml").write_text(LOOPS)
    more = ["experiment_name=e", "total_training_steps=12", "total_epochs=9", "rollout_data_dir=dumps"]
    settings = [*SETTINGS, *(f"trainer.{setting}" for setting in more)]
    programs.command("verl.trainer.main_ppo", *settings, cwd=tmp_path)
    steps = programs.metrics(tmp_path, "agents", "e")
    rewards = programs.curve(steps, "critic/rewards/mean")
    assert rewards[0] < 0.5 and max(rewards[-3:]) > 0.9, rewards
    assert all(step["rollout/agent/calls"] == 2 and step["rollout/agent/failed"] == 0 for step in steps)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "trained on are the tokens that were sampled"
        assert step["rollout/sampled_tokens"] == 2 * 8 * 2, "prompts x samples x calls of one token"
    dumped = records(tmp_path / "dumps" / "1.jsonl")
    assert len(dumped) == 16 and all("again" in row["output"] for row in dumped)
