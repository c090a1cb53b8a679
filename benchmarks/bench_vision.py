"""A GRPO step of a model that sees, ours against TRL's `GRPOTrainer`; what n samples of a prompt with a picture cost.

    python benchmarks/bench_vision.py --peer-python path/to/venv-with-trl/bin/python [--rounds 3] [--pixels 112]

Both sides train the same folder, a Qwen2.5-VL of 8 million parameters, on the same pictures: float32, 8 prompts
with a picture each x 8 samples x 32 new tokens (end tokens are ignored), one update per batch, no reference model. The
peer's environment is that of `bench_grpo_step.py`, with pillow and torchvision. A round runs ours, then the peer's.

The second table is the sampler's: seconds for 8 prompts with n = 1 and with n = 8 samples of one token, where all cost
lies in the prompts; and how often the vision tower runs per picture in a step, in sampling and in training, where it is
frozen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_grpo_step import OURS
from figures import ROOT, TRL_CLOCK, Figures, Run, add_json, against_trl, run_script

PROMPTS, SAMPLES, NEW_TOKENS, WARMUP = 8, 8, 32, 2
SIZES = {"hidden": 256, "layers": 4, "vision_layers": 4}
QUESTION = "What is in the picture?"

PEER = (
    TRL_CLOCK
    + """
from datasets import Dataset, Features, Image, Value
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer
model, rows, steps, out = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
batch, group, length = map(int, sys.argv[5:])

def reward(completions, **kwargs):
    return [float(len(str(c)) % 7) for c in completions]

config = GRPOConfig(
    output_dir=out, per_device_train_batch_size=batch, num_generations=group, max_completion_length=length,
    max_steps=steps, gradient_checkpointing=False, num_iterations=1, beta=0.0, temperature=1.0, learning_rate=1e-5,
    logging_steps=1000000, save_strategy="no", report_to=[], bf16=False, use_cpu=True, disable_tqdm=True,
    shuffle_dataset=False, generation_kwargs={"min_new_tokens": length}, seed=1, model_init_kwargs={"dtype": "float32"},
)
data = Dataset.from_list(rows).cast_column("image", Image())
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data,
                      processing_class=AutoProcessor.from_pretrained(model), callbacks=[Clock()])
mark()
trainer.train()
tell()
"""
)


def make_inputs(folder: Path, pixels: int) -> Path:
    """The model, our rows (parquet), the peer's (JSON) and their pictures, all from fixed seeds; returns the model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.harness.vision import pictures, tiny_vision_dir

    model, ours, theirs = tiny_vision_dir(folder / "model", **SIZES), [], []
    for number, picture in enumerate(pictures([(pixels, pixels)] * PROMPTS * 32)):
        path = folder / f"{number}.png"
        picture.save(path)
        message = {"role": "user", "content": f"<image>{QUESTION} {number:03d}"}
        ours.append({"prompt": [message], "images": [str(path)], "data_source": "bench",
                     "reward_model": {"ground_truth": "0"}})  # fmt: skip
        theirs.append({"prompt": [{"role": "user", "content": f"{QUESTION} {number:03d}"}], "image": str(path)})
    pq.write_table(pa.Table.from_pylist(ours), folder / "prompts.parquet")
    (folder / "prompts.json").write_text(json.dumps(theirs))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 7)\n"
    )
    return model


def words_of(folder: Path, model: Path, steps: int, samples: int, length: int) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'prompts.parquet'}",
        f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=256", f"data.max_response_length={length}",
        "data.shuffle=false", f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.n={samples}",
        "actor_rollout_ref.rollout.enable_vision=true", "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", "actor_rollout_ref.actor.optim.lr=1e-5",
        f"reward.custom_reward_function.path={folder / 'reward.py'}", f"trainer.total_training_steps={steps}",
        "trainer.logger=[file]", "trainer.project_name=bench", "trainer.experiment_name=ours",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.resume_mode=disable", "trainer.device=cpu",
    ]  # fmt: skip


def run_ours(folder: Path, model: Path, steps: int, more: list[str]) -> Run:
    return run_script(sys.executable, OURS, [*words_of(folder, model, steps, SAMPLES, NEW_TOKENS), *more], folder, True)


def run_peer(folder: Path, python: str, model: Path, steps: int) -> Run:
    sizes = map(str, (PROMPTS * SAMPLES, SAMPLES, NEW_TOKENS))
    words = [str(model), str(folder / "prompts.json"), str(steps), str(folder / "peer-out"), *sizes]
    return run_script(python, PEER, words, folder, ours=False)


def compare(folder: Path, model: Path, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Both sides in turn: medians over the rounds, and how often the peer's time ours is."""
    mine, peer = list[Run](), list[Run]()
    for _ in range(arguments.rounds):
        mine.append(run_ours(folder, model, arguments.steps, arguments.more))
        if arguments.peer_python:
            peer.append(run_peer(folder, arguments.peer_python, model, arguments.steps))
    return against_trl(mine, peer, WARMUP)


COUNTS = """
import json, sys
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower
from verl.config import load_config
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo import stages
from verl.trainer.ppo.callbacks import Callback
seen, steps, forward, generate = [0, 0], [], Tower.forward, stages.generate

def counted(self, hidden_states, grid_thw, **more):
    seen[0] += len(grid_thw)
    return forward(self, hidden_states, grid_thw, **more)

def sampled(rows, roles, ctx):
    before = seen[0]
    samples = generate(rows, roles, ctx)
    seen[1] += seen[0] - before
    return samples

Tower.forward, stages.generate = counted, sampled

class Count(Callback):
    def on_step_end(self, trainer, batch):
        steps.append({"gen": trainer.ctx.timers.seconds["gen"], "in all": seen[0], "in sampling": seen[1]})
        seen[:] = 0, 0

class Runner(TaskRunner):
    def make_trainer(self, config, tokenizer, processor):
        trainer = super().make_trainer(config, tokenizer, processor)
        trainer.callbacks.append(Count())
        return trainer

run_ppo(load_config("ppo_trainer", sys.argv[1:]), Runner)
print("COUNTED " + json.dumps(steps))
"""


def counted(folder: Path, words: list[str]) -> list[dict[str, float]]:
    """Seconds of sampling and passes of the tower, of every step that counts."""
    script = folder / "counts.py"
    script.write_text(COUNTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("COUNTED "))
    return json.loads(line.removeprefix("COUNTED "))[WARMUP:]


def share(folder: Path, model: Path, arguments: argparse.Namespace) -> dict[str, float | str]:
    """What eight samples of a prompt cost where all that they cost is the prompt, and the passes of a frozen tower."""
    frozen = ["actor_rollout_ref.actor.freeze_vision_tower=true", "algorithm.adv_estimator=reinforce_plus_plus"]
    steps = {
        samples: [
            step
            for _ in range(arguments.rounds)
            for step in counted(folder, [*words_of(folder, model, arguments.steps, samples, 1), *frozen])
        ]
        for samples in (1, SAMPLES)
    }
    one, many = (statistics.median(step["gen"] for step in steps[samples]) for samples in (1, SAMPLES))
    last = steps[SAMPLES][-1]
    return {
        "n = 1, s": one,
        f"n = {SAMPLES}, s": many,
        "ratio": many / one,
        "tower per picture, sampling": last["in sampling"] / PROMPTS,
        "tower per picture, training": (last["in all"] - last["in sampling"]) / PROMPTS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--pixels", type=int, default=112, help="height and width of a picture")
    parser.add_argument("--steps", type=int, default=8, help=f"steps per run; the first {WARMUP} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", nargs="*", default=[], help="settings of ours, key=value")
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = Figures()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_inputs(folder, arguments.pixels)
        for name, measure in (("a GRPO step", compare), ("prompts", share)):
            show(name, measure(folder, model, arguments), figures)
    figures.write(arguments.json)


def show(name: str, row: dict[str, float | str], figures: Figures) -> None:
    """As a Markdown table with one line per number."""
    figures.add(name, row)
    print(f"\n| {name} | |\n|---|---|", flush=True)
    for key, value in row.items():
        print(f"| {key} | {value if isinstance(value, str) else f'{value:.3f}'} |", flush=True)


if __name__ == "__main__":
    main()
