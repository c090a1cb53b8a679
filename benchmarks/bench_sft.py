"""Supervised fine-tuning, ours beside TRL's `SFTTrainer`, in turn, on the same model folder and the same tokens.

    python benchmarks/bench_sft.py --peer-python path/to/venv-with-trl/bin/python [--size 10M] [--rounds 3]

The peer lives in an environment of its own (``pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0``). Both
sides: float32, no gradient checkpointing, 32 rows per optimizer step with log-normal lengths, loss on the answers,
AdamW with equal settings and a constant rate. The peer gets the token ids ready-made and is tried in several settings
first; its fastest one counts. A round runs ours, then the peer's; the table gives tokens (padding not counted) per
CPU-second, so that a busy machine slows neither side more than the other, and the losses are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_grpo_step import SIZES, make_model

ROWS, WARMUP, LONGEST = 32, 1, 512
AS_THEY_COME = "rows-as-they-come.json"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
PEER_SETTINGS = {
    "padded, one pass": {"per_device_train_batch_size": ROWS},
    "padded, passes of 8 rows of like length": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ROWS // 8,
    },
    "padded, passes of 4 rows of like length": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": ROWS // 4,
    },
    "padded, passes of 8 rows as they come": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ROWS // 8,
    },
    "padding-free, passes of 8 rows": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ROWS // 8,
        "padding_free": True,
    },
}

OURS = """
import json, sys, time
from verl.config import load_config
from verl.data import stateful_loader
from verl.trainer import launch, PROGRAM as program
marks = []

def build(config, tokenizer, ctx):
    trainer = program.build(config, tokenizer, ctx)
    loader = trainer.train_loader  # in the order of the file, as the peer's
    trainer.train_loader = stateful_loader(
        loader.dataset, batch_size=ROWS, shuffle=False, seed=1, num_workers=0, drop_last=True, collate_fn=COLLATE
    )
    train, losses = trainer._train, []

    def timed(batch):
        found = train(batch)
        marks.append(time.process_time())
        losses.append(found["train/loss"])
        return found

    trainer._train, trainer.losses = timed, losses
    build.trainer = trainer
    marks.append(time.process_time())
    return trainer

launch.run(load_config("PROGRAM", sys.argv[1:]), build)
print("FOUND " + json.dumps([[b - a for a, b in zip(marks, marks[1:])], build.trainer.losses]))
"""

PEER = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
model, rows, steps, out = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
settings = json.loads(sys.argv[5])
marks, losses = [], []

class Clock(TrainerCallback):
    def on_step_end(self, *a, **k):
        marks.append(time.process_time())

    def on_log(self, args, state, control, logs=None, **k):
        if "loss" in logs:
            losses.append(float(logs["loss"]))

config = SFTConfig(
    output_dir=out, max_steps=steps, gradient_checkpointing=False, learning_rate=1e-4, lr_scheduler_type="constant",
    weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
    report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, max_length=None, seed=1,
    train_sampling_strategy="sequential", model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    **settings,
)
trainer = SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows),
                     processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
marks.append(time.process_time())
trainer.train()
print("FOUND " + json.dumps([[b - a for a, b in zip(marks, marks[1:])], losses]))
"""


def lengths(count: int, draw: random.Random, median: float, spread: float = 0.8) -> list[int]:
    """Log-normal lengths in tokens, those of chat data: many short rows and a long tail."""
    return [max(4, min(LONGEST // 2 - 8, round(draw.lognormvariate(0, spread) * median))) for _ in range(count)]


def text(length: int, draw: random.Random) -> str:
    return "".join(draw.choice("abcdefghijklmnop ") for _ in range(length))


def make_rows(folder: Path, steps: int) -> tuple[Path, Path, list[int]]:
    """Our conversations, the peer's token ids and labels, and the tokens of each step.

    Both take the rows of a step in the order of their lengths, which makes the peer's passes as even as they can be.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, rows = random.Random(0), []
    for question, answer in zip(lengths(ROWS * steps, draw, 40), lengths(ROWS * steps, draw, 70)):
        rows.append((text(question, draw), text(answer, draw)))
    batches = [sorted(rows[i : i + ROWS], key=lambda r: len(r[0]) + len(r[1])) for i in range(0, len(rows), ROWS)]
    rows = [row for batch in batches for row in batch]
    ours, theirs = folder / "rows.parquet", folder / "rows.json"
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in turns]), ours)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(next(folder.glob("model-*")))
    ready = []
    for question, answer in rows:
        asked, said = (tokenizer.encode(part + "<|end|>", add_special_tokens=False) for part in (question, answer))
        ready.append({"input_ids": asked + said, "labels": [-100] * len(asked) + said})
    theirs.write_text(json.dumps(ready))
    mixed = [row for i in range(0, len(ready), ROWS) for row in draw.sample(ready[i : i + ROWS], ROWS)]
    (folder / AS_THEY_COME).write_text(json.dumps(mixed))
    counts = [len(row["input_ids"]) for row in ready]
    return ours, theirs, [sum(counts[i : i + ROWS]) for i in range(0, len(counts), ROWS)]


def our_script(program: str, collate: str, rows: int = ROWS) -> str:
    """The timed run of one of our programs of supervised training."""
    head = "from functools import partial\nfrom verl.data import sft_collate\n"
    return head + OURS.replace("PROGRAM", program).replace("COLLATE", collate).replace("ROWS", str(rows))


def run_ours(folder: Path, model: Path, rows: Path, steps: int) -> tuple[list[float], list[float]]:
    """CPU-seconds and loss of each step of `sft_trainer`."""
    words = [
        f"data.train_files={rows}", f"data.train_batch_size={ROWS}", f"data.max_length={LONGEST}",
        "data.max_token_len_per_gpu=1024", f"model.path={model}", "optim.lr=1e-4", "optim.weight_decay=0",
        "optim.betas=[0.9,0.999]", "optim.clip_grad=1.0", "optim.lr_scheduler_type=constant",
        f"trainer.total_training_steps={steps}", "trainer.logger=[file]", f"trainer.default_local_dir={folder / 'run'}",
        "trainer.device=cpu", "trainer.resume_mode=disable",
    ]  # fmt: skip
    script = our_script("sft_trainer", "partial(sft_collate, pad_token_id=tokenizer.pad_token_id)")
    return child(sys.executable, script, words, folder, Path(__file__).resolve().parents[1])


def run_peer(
    folder: Path, python: str, model: Path, rows: Path, steps: int, settings: dict
) -> tuple[list[float], list[float]]:
    words = [str(model), str(rows), str(steps), str(folder / "peer-out"), json.dumps(settings)]
    return child(python, PEER, words, folder, None)


def child(
    python: str, script: str, words: list[str], folder: Path, root: Path | None
) -> tuple[list[float], list[float]]:
    """Run a script in a process of its own and read what it found."""
    (folder / "child.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    environment |= {"PYTHONPATH": str(root)} if root else {}
    done = subprocess.run(
        [python, str(folder / "child.py"), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    seconds, losses = json.loads(line.removeprefix("FOUND "))
    return seconds, losses


def speed(tokens: list[int], seconds: list[float]) -> float:
    """Tokens per CPU-second over all counted steps."""
    return sum(tokens[WARMUP:]) / sum(seconds[WARMUP:])


def furthest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--steps", type=int, default=8, help=f"steps per run; the first {WARMUP} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-setting", choices=PEER_SETTINGS, help="take this one instead of trying all")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder, arguments.size, TEMPLATE, LONGEST)
        ours, theirs, tokens = make_rows(folder, arguments.steps)
        print(f"{ROWS} rows per step, {statistics.mean(tokens):.0f} tokens on average, one thread, float32", flush=True)
        tried = {}
        for name, settings in PEER_SETTINGS.items() if arguments.peer_python and not arguments.peer_setting else ():
            rows = folder / AS_THEY_COME if name.endswith("as they come") else theirs
            seconds, _ = run_peer(folder, arguments.peer_python, model, rows, arguments.steps, settings)
            tried[name] = speed(tokens, seconds)
            print(f"TRL {name}: {tried[name]:.0f} tokens per CPU-second", flush=True)
        best = arguments.peer_setting or max(tried, key=tried.__getitem__, default="")
        mine, peer, apart = [], [], []
        for _ in range(arguments.rounds):
            seconds, losses = run_ours(folder, model, ours, arguments.steps)
            mine.append(speed(tokens, seconds))
            if best:
                rows = folder / AS_THEY_COME if best.endswith("as they come") else theirs
                seconds, others = run_peer(
                    folder, arguments.peer_python, model, rows, arguments.steps, PEER_SETTINGS[best]
                )
                peer.append(speed(tokens, seconds))
                apart.append(furthest(losses, others))
    print("| model | ours, tokens/CPU-s | TRL, tokens/CPU-s | ours / TRL, per round | losses apart at most |")
    print("|---|---|---|---|---|")
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, peer))
    theirs_speed = f"{statistics.median(peer):.0f} ({best})" if peer else "-"
    ours_speed, differ = f"{statistics.median(mine):.0f}", f"{max(apart, default=0):.1e}"
    print(f"| {arguments.size} | {ours_speed} | {theirs_speed} | {ratios} | {differ} |")


if __name__ == "__main__":
    main()
