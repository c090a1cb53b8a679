"""Supervised fine-tuning, ours beside TRL's `SFTTrainer`, in turn, on the same model folder and the same tokens.

    python benchmarks/bench_sft.py --peer-python path/to/venv-with-trl/bin/python [--size 10M | --model FOLDER]

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
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_grpo_step import SIZES, make_model
from figures import MARKS, TRL_CLOCK, Figures, Run, add_json, run_script

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

OURS = (
    MARKS
    + """
from verl.config import load_config
from verl.data import StatefulLoader
from verl.trainer import launch

def build(config, tokenizer, ctx):
    trainer = build_trainer(config, tokenizer, ctx)
    loader = trainer.train_loader  # in the order of the file, as the peer's
    trainer.train_loader = StatefulLoader(
        loader.dataset, batch_size=ROWS, shuffle=False, seed=1, num_workers=0, drop_last=True, collate_fn=COLLATE
    )
    train = trainer._train

    def timed(batch):
        found = train(batch)
        mark()
        losses.append(found["train/loss"])
        return found

    trainer._train = timed
    mark()
    return trainer

launch.run_checked(load_config("PROGRAM", sys.argv[1:]), build)
tell()
"""
)

IMPORTS = """
from functools import partial
from verl.data import sft_collate
from verl.trainer.sft_trainer import build_sft as build_trainer
"""

PEER = (
    TRL_CLOCK
    + """
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
model, rows, steps, out = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
settings = json.loads(sys.argv[5])
config = SFTConfig(
    output_dir=out, max_steps=steps, gradient_checkpointing=False, learning_rate=1e-4, lr_scheduler_type="constant",
    weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
    report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, max_length=None, seed=1,
    train_sampling_strategy="sequential", model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    **settings,
)
trainer = SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows),
                     processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
mark()
trainer.train()
tell()
"""
)


def copied(model: Path, folder: Path) -> Path:
    """A model with the benchmark's chat template, whose turns end with the model's token for that."""
    from transformers import AutoTokenizer

    copy = shutil.copytree(model, folder / f"model-{model.name}", ignore=shutil.ignore_patterns("chat_template*"))
    end = AutoTokenizer.from_pretrained(copy).eos_token
    (copy / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", end))
    return copy


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
        turns_of_row = (part + tokenizer.eos_token for part in (question, answer))
        asked, said = (tokenizer.encode(turn, add_special_tokens=False) for turn in turns_of_row)
        ready.append({"input_ids": asked + said, "labels": [-100] * len(asked) + said})
    theirs.write_text(json.dumps(ready))
    mixed = [row for i in range(0, len(ready), ROWS) for row in draw.sample(ready[i : i + ROWS], ROWS)]
    (folder / AS_THEY_COME).write_text(json.dumps(mixed))
    counts = [len(row["input_ids"]) for row in ready]
    return ours, theirs, [sum(counts[i : i + ROWS]) for i in range(0, len(counts), ROWS)]


def our_script(program: str, imports: str, collate: str, rows: int = ROWS) -> str:
    """The timed run of one of our programs of supervised training; ``imports`` bring its ``build_trainer``."""
    script = OURS.replace("PROGRAM", program).replace("COLLATE", collate).replace("ROWS", str(rows))
    return f"{imports}\n{script}"


def run_ours(folder: Path, model: Path, rows: Path, steps: int) -> Run:
    """CPU-seconds and loss of each step of `sft_trainer`."""
    words = [
        f"data.train_files={rows}", f"data.train_batch_size={ROWS}", f"data.max_length={LONGEST}",
        "data.max_token_len_per_gpu=1024", f"model.path={model}", "optim.lr=1e-4", "optim.weight_decay=0",
        "optim.betas=[0.9,0.999]", "optim.clip_grad=1.0", "optim.lr_scheduler_type=constant",
        f"trainer.total_training_steps={steps}", "trainer.logger=[file]", f"trainer.default_local_dir={folder / 'run'}",
        "trainer.device=cpu", "trainer.resume_mode=disable",
    ]  # fmt: skip
    script = our_script("sft_trainer", IMPORTS, "partial(sft_collate, pad_token_id=tokenizer.pad_token_id)")
    return run_script(sys.executable, script, words, folder, ours=True)


def run_peer(folder: Path, python: str, model: Path, rows: Path, steps: int, settings: dict) -> Run:
    words = [str(model), str(rows), str(steps), str(folder / "peer-out"), json.dumps(settings)]
    return run_script(python, PEER, words, folder, ours=False)


def speed(tokens: list[int], run: Run) -> float:
    """Tokens per CPU-second over all counted steps."""
    return sum(tokens[WARMUP:]) / sum(run.cpu[WARMUP:])


def furthest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--model", type=Path, help="folder of a model to take instead, on two threads")
    parser.add_argument("--steps", type=int, default=8, help=f"steps per run; the first {WARMUP} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-setting", choices=PEER_SETTINGS, help="take this one instead of trying all")
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2" if arguments.model else "1")
    threads, size = os.environ["OMP_NUM_THREADS"], "published model" if arguments.model else arguments.size
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = copied(arguments.model, folder) if arguments.model else make_model(folder, size, TEMPLATE, LONGEST)
        ours, theirs, tokens = make_rows(folder, arguments.steps)
        mean = statistics.mean(tokens)
        print(f"{ROWS} rows per step, {mean:.0f} tokens on average, {threads} threads, float32", flush=True)
        tried = {}
        for name, settings in PEER_SETTINGS.items() if arguments.peer_python and not arguments.peer_setting else ():
            rows = folder / AS_THEY_COME if name.endswith("as they come") else theirs
            run = run_peer(folder, arguments.peer_python, model, rows, arguments.steps, settings)
            tried[name] = speed(tokens, run)
            print(f"TRL {name}: {tried[name]:.0f} tokens per CPU-second", flush=True)
        best = arguments.peer_setting or max(tried, key=tried.__getitem__, default="")
        mine, peer, apart = [], [], []
        for _ in range(arguments.rounds):
            own = run_ours(folder, model, ours, arguments.steps)
            mine.append(speed(tokens, own))
            if best:
                rows = folder / AS_THEY_COME if best.endswith("as they come") else theirs
                run = run_peer(folder, arguments.peer_python, model, rows, arguments.steps, PEER_SETTINGS[best])
                peer.append(speed(tokens, run))
                apart.append(furthest(own.losses, run.losses))
    print("| model | ours, tokens/CPU-s | TRL, tokens/CPU-s | ours / TRL, per round | losses apart at most |")
    print("|---|---|---|---|---|")
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, peer))
    theirs_speed = f"{statistics.median(peer):.0f} ({best})" if peer else "-"
    ours_speed, differ = f"{statistics.median(mine):.0f}", f"{max(apart, default=0):.1e}"
    print(f"| {size} | {ours_speed} | {theirs_speed} | {ratios} | {differ} |")
    figures = Figures()
    figures.add(size, compared(mine, peer) | {"the peer's setting": best or "absent"})
    figures.write(arguments.json)


def compared(mine: list[float], peer: list[float]) -> dict[str, float | str]:
    """Both speeds, and ours over the peer's."""
    found: dict[str, float | str] = {"ours, tokens per CPU-s": statistics.median(mine)}
    if peer:
        ratios = [a / b for a, b in zip(mine, peer)]
        found["TRL, tokens per CPU-s"] = statistics.median(peer)
        found["ours / TRL"] = statistics.median(ratios)
        found["ours / TRL, per round"] = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return found


if __name__ == "__main__":
    main()
