"""GRPO on two-digit additions with `verl.train`."""

import verl

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 50) for b in range(10, 50)]


def right(solution_str, ground_truth):
    return float(solution_str.strip() == ground_truth)


settings = {"actor_rollout_ref.actor.optim.lr": 3e-4, "data.max_prompt_length": 32, "data.max_response_length": 8}
model = "outputs/quickstart/sft/global_step_360/model/huggingface"
run = verl.train("grpo", model=model, data=rows, reward=right, **settings)
