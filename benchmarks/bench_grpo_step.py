"""A whole GRPO step, ours beside TRL's `GRPOTrainer`, in turn, on the same model folder and the same prompts.

    python benchmarks/bench_grpo_step.py --peer-python path/to/venv-with-trl/bin/python [--sizes 0.1M 10M tail]

The peer lives in an environment of its own (``pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0``). Both
sides: float32, no gradient checkpointing, one update per batch, no reference model, 16 prompts x 8 samples x 32 new
tokens (end tokens are ignored, so that both generate and train the same number of tokens), AdamW. ``tail`` is the model
of 1M whose every token is the last one with probability 1/32, up to 256 tokens. A round runs ours, then the peer's; the
table gives the median seconds per step over all counted steps, and the ratios of each round, by the clock and by the
CPU's time (that of children included), which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from figures import MARKS, TRL_CLOCK, Figures, Run, add_json, against_trl, linear_seconds, run_script

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, WARMUP = 16, 8, 32, 32, 3
TAIL_TOKENS, TAIL_MEAN = 256, 32
SIZES = {
    "0.1M": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "1M": {"hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 384},
    "10M": {"hidden_size": 320, "num_hidden_layers": 8, "num_attention_heads": 10, "intermediate_size": 864},
}
SIZES["tail"] = SIZES["1M"]
VOCAB = 512

PEER = (
    TRL_CLOCK
    + """
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
model, rows, steps, out = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
batch, passes, group, length, shortest = map(int, sys.argv[5:])

def reward(completions, **kwargs):
    return [float(len(str(c)) % 7) for c in completions]

config = GRPOConfig(
    output_dir=out, per_device_train_batch_size=batch, gradient_accumulation_steps=passes, num_generations=group,
    max_completion_length=length, max_steps=steps, gradient_checkpointing=False, num_iterations=1, beta=0.0,
    temperature=1.0, learning_rate=1e-5,
    logging_steps=1000000, save_strategy="no", report_to=[], bf16=False, use_cpu=True, disable_tqdm=True,
    shuffle_dataset=False, generation_kwargs={"min_new_tokens": shortest}, seed=1,
    model_init_kwargs={"dtype": "float32"},
)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
                      processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
mark()
trainer.train()
tell()
"""
)

OURS = (
    MARKS
    + """
from verl.config import load_config
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

class Clock(Callback):
    def on_fit_begin(self, trainer):
        mark()

    def on_step_end(self, trainer, batch):
        mark()

class Runner(TaskRunner):
    def make_trainer(self, config, tokenizer, processor):
        trainer = super().make_trainer(config, tokenizer, processor)
        trainer.callbacks.append(Clock())
        return trainer

run_ppo(load_config("ppo_trainer", sys.argv[1:]), Runner)
tell()
"""
)


def make_model(folder: Path, size: str, template: str, positions: int = 512) -> Path:
    """A folder with a new language model, seed 0, and a tokenizer of one token per byte that ends with ``<|end|>``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    model = folder / f"model-{size}"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|end|>", "<|pad|>", *letters]
    words += [f"word{i}" for i in range(VOCAB - len(words))]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template=template
    )
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    shape = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCAB, num_key_value_heads=shape["num_attention_heads"] // 2, max_position_embeddings=positions,
        eos_token_id=0, pad_token_id=1, bos_token_id=None, tie_word_embeddings=True, **shape,
    )  # fmt: skip
    network = Qwen2ForCausalLM(config)
    network.save_pretrained(model)
    print(f"{size}: {sum(p.numel() for p in network.parameters()) / 1e6:.2f}M parameters", flush=True)
    return model


def make_inputs(folder: Path, size: str) -> tuple[Path, Path, Path]:
    """Model folder, our prompts (parquet) and the peer's (JSON), all from fixed seeds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = make_model(folder, size, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    texts = [f"prompt {i:05d} of 32 tokens".ljust(PROMPT_TOKENS, ".") for i in range(PROMPTS * 64)]
    rows = [
        {"prompt": [{"role": "user", "content": t}], "data_source": "bench", "reward_model": {"ground_truth": "0"}}
        for t in texts
    ]
    ours, theirs = folder / "prompts.parquet", folder / "prompts.json"
    pq.write_table(pa.Table.from_pylist(rows), ours)
    theirs.write_text(json.dumps([{"prompt": t} for t in texts]))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 7)\n"
    )
    return model, ours, theirs


def end_often(model: Path) -> None:
    """Make every token the end with probability 1 / `TAIL_MEAN`, by a component that all hidden states share."""
    import math

    import torch
    from transformers import Qwen2ForCausalLM

    network = Qwen2ForCausalLM.from_pretrained(model, tie_word_embeddings=False)
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 0] = 1.0
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        hidden = network.model(torch.arange(64)[None] + 2).last_hidden_state[0, :, 0].mean()
        network.lm_head.weight.mul_(0.1)[:, 0] = 0.0
        network.lm_head.weight[0] = 0.0
        network.lm_head.weight[0, 0] = math.log(VOCAB / TAIL_MEAN) / hidden
    network.config.tie_word_embeddings = False
    network.save_pretrained(model)


def run_ours(
    folder: Path, model: Path, prompts: Path, steps: int, length: int, more: list[str], script: str = OURS
) -> Run:
    words = [
        "algorithm.adv_estimator=grpo", f"data.train_files={prompts}",
        f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=64", f"data.max_response_length={length}",
        "data.shuffle=false", f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.ignore_eos={str(length == NEW_TOKENS).lower()}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-5", f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.total_training_steps={steps}", "trainer.logger=[file]", "trainer.project_name=bench",
        "trainer.experiment_name=ours", f"trainer.default_local_dir={folder / 'run'}", "trainer.resume_mode=disable",
        *more,
    ]  # fmt: skip
    return run_script(sys.executable, script, words, folder, ours=True)


def run_peer(folder: Path, python: str, model: Path, prompts: Path, steps: int, length: int, passes: int = 1) -> Run:
    """``passes``: of the backward pass, whose gradients add up to a step's."""
    shortest = length if length == NEW_TOKENS else 1
    sizes = map(str, (PROMPTS * SAMPLES // passes, passes, SAMPLES, length, shortest))
    words = [str(model), str(prompts), str(steps), str(folder / "peer-out"), *sizes]
    return run_script(python, PEER, words, folder, ours=False)


def product_seconds(model: Path) -> float:
    """CPU seconds of a step of `NEW_TOKENS` tokens per response that the linear layers alone would take.

    Every distinct token goes forwards when it is sampled, and forwards and backwards (twice the work) in training.
    """
    from transformers import Qwen2ForCausalLM

    network = Qwen2ForCausalLM.from_pretrained(model, dtype="float32")
    rows = PROMPTS * SAMPLES
    prompt, drawn = PROMPTS * PROMPT_TOKENS, rows * (NEW_TOKENS - 1)
    many = linear_seconds(network, 1024)
    return drawn * linear_seconds(network, rows) + prompt * many + 3 * (prompt + drawn) * many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--sizes", nargs="+", default=["0.1M", "10M"], choices=SIZES)
    parser.add_argument("--steps", type=int, default=12, help=f"steps per run; the first {WARMUP} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", nargs="*", default=[], help="settings of ours, key=value")
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures, lines = Figures(), []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            found = compare(Path(temporary), size, arguments)
        figures.add(size, found)
        lines.append(f"| {size} | {' | '.join(x if isinstance(x, str) else f'{x:.3f}' for x in found.values())} |")
        heads = list(found)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"\n{PROMPTS} prompts x {SAMPLES} samples, {threads} threads, float32, seconds per step")
    print(f"| model | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    print("\n".join(lines))
    figures.write(arguments.json)


def compare(folder: Path, size: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Both sides in turn: medians over the rounds, and how often the peer's time ours is."""
    model, ours, theirs = make_inputs(folder, size)
    length = TAIL_TOKENS if size == "tail" else NEW_TOKENS
    if size == "tail":
        end_often(model)
    mine, peer = [], []
    for _ in range(arguments.rounds):
        mine.append(run_ours(folder, model, ours, arguments.steps, length, arguments.more))
        if arguments.peer_python:
            peer.append(run_peer(folder, arguments.peer_python, model, theirs, arguments.steps, length))
    row = against_trl(mine, peer, WARMUP)
    if size != "tail":
        row["matrix products alone, CPU s"] = product_seconds(model)
    return row


if __name__ == "__main__":
    main()
