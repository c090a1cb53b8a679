"""A conversation with a tool over an HTTP server of vLLM's kind: every turn goes out as the tokens of all before it."""

from __future__ import annotations

from tests.harness.conversations import manager, rollout, rows
from tests.harness.every_answer import __file__ as tools
from tests.harness.models import tiny_model_dir, tiny_tokenizer
from tests.harness.servers import completion, serving
from verl.rollout.server.sampler import ServerSampler

PATH = "/v1/completions"


def test_every_turn_goes_on_from_the_sampled_tokens_with_a_seed_of_its_own(tmp_path):
    tokenizer = tiny_tokenizer()
    folder = str(tiny_model_dir(tmp_path / "model", max_positions=512))
    answers = [completion((70, 71, 8), (-0.5, -0.25, -0.125)), completion((72, 16), (-0.5, -1.0)), completion((73, 24))]
    limits = {"/v1/models": (200, {"data": [{"id": "tiny", "max_model_len": 512}]})}
    config = rollout(
        multi_turn__enable=True,
        multi_turn__format="tests.harness.every_answer.EveryAnswer",
        multi_turn__function_tool_path=tools,
        multi_turn__max_assistant_turns=3,
        response_length=120,
    )
    with serving({**limits, PATH: list(answers)}) as server:
        sampler = ServerSampler(server.url, model=folder, timeout=5.0, max_attempts=1, retry_delay=0.01)
        batch = manager(config, sampler, tokenizer).generate_sequences(rows([{"role": "user", "content": "hi"}]))
        asked = server.payloads(PATH)
    between = tokenizer("<|im_end|>\n<|im_start|>tool\nwet<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    whole = [70, 71, 8, *between, 72, 16, *between, 73, 24]
    assert batch.batch["responses"][0].tolist() == whole
    n = len(between)
    assert batch.batch["response_mask"][0].tolist() == [1] * 3 + [0] * n + [1] * 2 + [0] * n + [1] * 2
    prompt = tokenizer("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert [payload["prompt"] for payload in asked] == [prompt, prompt + whole[: 3 + n], prompt + whole[: 5 + 2 * n]]
    assert len({payload["seed"] for payload in asked}) == 3
    assert [payload["max_tokens"] for payload in asked] == [120, 120 - 3 - n, 120 - 5 - 2 * n]
    assert batch.batch["rollout_log_probs"][0, :3].tolist() == [-0.5, -0.25, -0.125]
