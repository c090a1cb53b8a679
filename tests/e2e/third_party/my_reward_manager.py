"""A custom reward manager as upstream's documentation shows one: a share of distinct letters, less for length."""

from collections import defaultdict

import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("distinct")
class DistinctRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", penalty=0.0):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.penalty = penalty

    def __call__(self, data: DataProto, return_dict: bool = False):
        if "rm_scores" in data.batch.keys():
            return data.batch["rm_scores"]
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:valid], skip_special_tokens=True)
            assert item.non_tensor_batch[self.reward_fn_key] and item.non_tensor_batch["reward_model"]["ground_truth"]
            score = len(set(text)) / max(len(text), 1) - self.penalty * valid
            reward_extra_info["distinct"].append(score)
            if valid:
                reward_tensor[i, valid - 1] = score
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor
