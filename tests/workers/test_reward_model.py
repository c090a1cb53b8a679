"""The reward model's score is its head after the last response token, whatever padding surrounds the row."""

from __future__ import annotations

import torch

from tests.harness.reward_models import reward_model_dir, reward_worker
from verl.protocol import DataProto


def rows(prompts: list[list[int]], responses: list[list[int]]) -> DataProto:
    width, length = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), width + length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(prompts), length, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        ids[i, width - len(prompt) : width + len(response)] = torch.tensor(prompt + response)
        attention[i, width - len(prompt) : width + len(response)] = 1
        mask[i, : len(response)] = 1
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, width:],
            "response_mask": mask,
        }
    )


def test_the_score_is_the_head_after_the_last_token_and_stands_on_it(tmp_path):
    worker = reward_worker(reward_model_dir(tmp_path))
    data = rows([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    scores = worker.compute_rm_score(data).batch["rm_scores"]
    model = worker.part.engine.model
    model.eval()
    for row, (sequence, last) in enumerate([([5, 6, 7, 9, 10], 1), ([8, 11, 12, 13], 2)]):
        with torch.no_grad():
            direct = model(torch.tensor([sequence])).logits[0, -1, 0]
        torch.testing.assert_close(scores[row, last], direct, atol=0, rtol=3e-7)  # of 7.2: 4 units in the last place
        assert scores[row].count_nonzero() == 1
