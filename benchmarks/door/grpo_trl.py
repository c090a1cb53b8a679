"""GRPO on two-digit additions with TRL's `GRPOTrainer`."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

sums = [(a, b) for a in range(10, 50) for b in range(10, 50)]
rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in sums]


def right(completions, answer, **kwargs):
    return [float(completion[0]["content"].strip() == truth) for completion, truth in zip(completions, answer)]


args = GRPOConfig(
    output_dir="outputs/trl",
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=8,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    num_train_epochs=1,
    logging_steps=1,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
)
model = "outputs/quickstart/sft/global_step_360/model/huggingface"
trainer = GRPOTrainer(model=model, reward_funcs=right, args=args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model()
