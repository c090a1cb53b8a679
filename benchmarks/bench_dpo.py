"""Direct preference optimisation, ours beside TRL's `DPOTrainer`, in turn, on the same model folder and the same pairs.

    python benchmarks/bench_dpo.py --peer-python path/to/venv-with-trl/bin/python [--size 10M] [--rounds 3]

The environments are those of `bench_sft.py`. Both sides: float32, no gradient checkpointing, 16 pairs per optimizer
step with log-normal lengths, sigmoid loss with beta 0.1 and a reference model beside the policy, AdamW with equal
settings. The peer is tried in several settings first, its fastest one counts. A round runs ours, then the peer's; the
table gives tokens (both answers with their prompt, padding not counted) per CPU-second. The losses are compared step by
step: those of the first step, where policy and reference are one, say nothing, so the policy starts from other weights
than the reference.

With ``--losses`` nothing is timed: the table has the loss of one batch, ours by `DPOTrainer.validate`, the peer's by
``compute_loss`` of the trainer of each method. TRL takes the mean likelihood of chosen answers over the tokens of a
pass, we over the answers: there TRL gets one pair per pass. Its ORPO also trains the prompt, and ours does not: that
row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

from bench_grpo_step import SIZES, make_model
from bench_sft import TEMPLATE, WARMUP, compared, furthest, lengths, our_script, speed, text
from figures import TRL_CLOCK, Figures, Run, add_json, run_script

PAIRS, LONGEST = 16, 512
IMPORTS = "from verl.trainer.dpo_trainer import build_dpo as build_trainer"
PEER_SETTINGS = {
    "one pass": {"per_device_train_batch_size": PAIRS},
    "passes of 4 pairs of like length": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": PAIRS // 4},
    "passes of 2 pairs of like length": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": PAIRS // 2},
}

PEER = (
    TRL_CLOCK
    + """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
model, rows, steps, out = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
settings, reference = json.loads(sys.argv[5]), sys.argv[6]
config = DPOConfig(
    output_dir=out, max_steps=steps, gradient_checkpointing=False, learning_rate=1e-5, lr_scheduler_type="constant",
    weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
    report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, max_length=None, seed=1, beta=0.1,
    train_sampling_strategy="sequential", **settings,
)
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="sdpa")
trainer = DPOTrainer(model=load(model), ref_model=load(reference), args=config, train_dataset=Dataset.from_list(rows),
                     processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
mark()
trainer.train()
tell()
"""
)


def make_rows(folder: Path, steps: int) -> tuple[Path, Path, list[int]]:
    """Our pairs, the peer's, and the tokens of each step; the pairs of a step stand in the order of their lengths."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, count = random.Random(0), PAIRS * steps
    sizes = zip(lengths(count, draw, 60), lengths(count, draw, 60), lengths(count, draw, 60))
    rows = [{name: text(size, draw) for name, size in zip(("prompt", "chosen", "rejected"), three)} for three in sizes]
    batches = [rows[i : i + PAIRS] for i in range(0, count, PAIRS)]
    rows = [row for batch in batches for row in sorted(batch, key=tokens_of)]
    ours, theirs = folder / "pairs.parquet", folder / "pairs.json"
    pq.write_table(pa.Table.from_pylist(rows), ours)
    said = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    turns = [{name: [{"role": role, "content": row[name]}] for name, role in said.items()} for row in rows]
    theirs.write_text(json.dumps(turns))
    return ours, theirs, [sum(map(tokens_of, batch)) for batch in batches]


SINGLE = {"per_device_train_batch_size": 1}
LOSSES: dict[str, tuple[str, str, str, dict]] = {
    "DPO": ("dpo.beta=0.1", "DPO", "loss", {"loss_type": ["sigmoid"]}),
    "SLiC": ("dpo.loss_type=hinge", "DPO", "loss", {"loss_type": ["hinge"]}),
    "IPO": ("dpo.loss_type=ipo dpo.length_normalised=true", "DPO", "loss", {"loss_type": ["ipo"]}),
    "CPO": ("dpo.loss_type=cpo", "CPO", "loss", {"cpo_alpha": 1.0, **SINGLE}),
    "CPO, label smoothing": (
        "dpo.loss_type=cpo dpo.label_smoothing=0.1", "CPO", "loss",
        {"cpo_alpha": 1.0, "label_smoothing": 0.1, **SINGLE},
    ),
    "SimPO": (
        "dpo.loss_type=simpo dpo.beta=2 dpo.simpo_gamma=1", "CPO", "loss",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0},
    ),
    "ORPO, odds ratio": ("dpo.loss_type=orpo dpo.sft_coef=0", "ORPO", "odds", {}),
    "ORPO, likelihood of answers": ("dpo.loss_type=orpo", "ORPO", "answer", {}),
    "ORPO as TRL has it, with prompts": ("dpo.loss_type=orpo", "ORPO", "loss", SINGLE),
    "KTO": ("dpo.loss_type=kto", "KTO", "loss", {"loss_type": "kto"}),
}  # fmt: skip
"""Method -> our settings; TRL's trainer, what of its loss is compared, its settings."""

PEER_LOSSES = """
import json, os, sys
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from statistics import mean
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
model, pairs, answers, out, reference, methods = sys.argv[1:4] + sys.argv[4:6] + [json.loads(sys.argv[6])]
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="sdpa")
losses = {}
for name, (which, term, settings) in methods.items():
    config = globals()[which + "Config"](
        output_dir=out, report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, max_length=2048,
        gradient_checkpointing=False, **{"per_device_train_batch_size": PAIRS, "beta": 0.1, **settings},
    )
    more = {"ref_model": load(reference)} if which in ("DPO", "KTO") else {}
    rows = Dataset.from_list(json.load(open(answers if which == "KTO" else pairs)))
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = globals()[which + "Trainer"](
        model=load(model), args=config, train_dataset=rows, processing_class=tokenizer, **more
    )
    trainer.model.eval()
    per_pass = []
    for batch in trainer.get_train_dataloader():
        loss = trainer.compute_loss(trainer.model, batch)
        if term != "loss":
            loss = loss - trainer._stored_metrics["train"]["nll_loss"][-1]
        if term == "answer":
            loss = loss - trainer._stored_metrics["train"]["logps/chosen"][-1]
        per_pass.append(float(loss))
    losses[name] = mean(per_pass)
print("FOUND " + json.dumps({"marks": [[0, 0, 0]], "losses": losses, "peak_mib": 0}))
"""


def our_loss(model: Path, reference: Path, rows: Path, folder: Path, settings: str) -> float:
    """Of one batch, as the program validates it."""
    from verl.config import load_config
    from verl.data import tokenizer_of
    from verl.distributed import Ranks
    from verl.single_controller.spmd import Spmd
    from verl.trainer.dpo_trainer import build_dpo

    words = [
        f"data.train_files={rows}", f"data.val_files={rows}", f"data.train_batch_size={PAIRS}", "data.max_length=2048",
        f"model.path={model}", f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", *settings.split(),
    ]  # fmt: skip
    if not any(name in settings for name in ("cpo", "simpo", "orpo")):
        words.append(f"dpo.ref_model_path={reference}")
    config = load_config("dpo_trainer", words)
    return build_dpo(config, tokenizer_of(config.model), Spmd(Ranks(), 1)).validate()["val/loss"]


def compare_losses(folder: Path, model: Path, reference: Path, ours: Path, python: str | None) -> Figures:
    """Every method on the first batch; labelled answers are the two answers of a pair in turn."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs = pq.read_table(ours).to_pylist()
    sides = ("chosen", "rejected")
    labelled = [
        {"prompt": row["prompt"], "completion": row[sides[i % 2]], "label": i % 2 == 0} for i, row in enumerate(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(labelled), folder / "answers.parquet")
    said = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "completion": "assistant"}
    for name, rows in (("pairs", pairs), ("answers", labelled)):
        turns = [{k: [{"role": said[k], "content": v}] if k in said else v for k, v in row.items()} for row in rows]
        (folder / f"{name}.json").write_text(json.dumps(turns))
    theirs: dict = {}
    if python:
        files = [str(folder / name) for name in ("pairs.json", "answers.json", "peer-out")]
        methods = {name: peer for name, (_, *peer) in LOSSES.items()}
        script = PEER_LOSSES.replace("PAIRS", str(PAIRS))
        words = [str(model), *files, str(reference), json.dumps(methods)]
        theirs = dict(run_script(python, script, words, folder, ours=False).losses)
    figures = Figures()
    print("| method | ours | TRL | differ by |\n|---|---|---|---|")
    for name, (settings, *_) in LOSSES.items():
        loss = our_loss(model, reference, folder / "answers.parquet" if name == "KTO" else ours, folder, settings)
        peer = theirs.get(name, float("nan"))
        print(f"| {name} | {loss:.6f} | {peer:.6f} | {abs(loss - peer):.1e} |", flush=True)
        figures.add(name, {"ours": loss, "TRL": peer, "losses differ by": abs(loss - peer)})
    return figures


def tokens_of(row: dict[str, str]) -> int:
    """Of both rows of a pair, each turn with its end token."""
    return 2 * (len(row["prompt"]) + 1) + len(row["chosen"]) + 1 + len(row["rejected"]) + 1


def make_reference(folder: Path, model: Path) -> Path:
    """The policy with a little noise on every weight."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    network.save_pretrained(folder / "reference")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "reference")
    return folder / "reference"


def run_ours(folder: Path, model: Path, reference: Path, pairs: Path, steps: int) -> Run:
    """CPU-seconds and loss of each step of `dpo_trainer`."""
    words = [
        f"data.train_files={pairs}", f"data.train_batch_size={PAIRS}", f"data.max_length={2 * LONGEST}",
        "data.max_token_len_per_gpu=2048", f"model.path={model}", f"dpo.ref_model_path={reference}", "dpo.beta=0.1",
        "optim.lr=1e-5", "optim.weight_decay=0", "optim.betas=[0.9,0.999]", "optim.clip_grad=1.0",
        "optim.lr_scheduler_type=constant", f"trainer.total_training_steps={steps}", "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", "trainer.resume_mode=disable",
    ]  # fmt: skip
    script = our_script("dpo_trainer", IMPORTS, "loader.dataset.collate", PAIRS)
    return run_script(sys.executable, script, words, folder, ours=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--steps", type=int, default=8, help=f"steps per run; the first {WARMUP} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--losses", action="store_true", help="compare the losses of all methods on one batch")
    parser.add_argument("--peer-setting", choices=PEER_SETTINGS, help="take this one instead of trying all")
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps, python = arguments.steps, arguments.peer_python
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder, arguments.size, TEMPLATE, 2 * LONGEST)
        reference = make_reference(folder, model)
        ours, theirs, tokens = make_rows(folder, 1 if arguments.losses else steps)
        if arguments.losses:
            compare_losses(folder, model, reference, ours, python).write(arguments.json)
            return
        print(
            f"{PAIRS} pairs per step, {statistics.mean(tokens):.0f} tokens on average, one thread, float32", flush=True
        )

        def peer_run(settings: dict) -> Run:
            out = str(folder / "peer-out")
            words = [str(model), str(theirs), str(steps), out, json.dumps(settings), str(reference)]
            return run_script(python, PEER, words, folder, ours=False)

        tried = {}
        for name, settings in PEER_SETTINGS.items() if python and not arguments.peer_setting else ():
            tried[name] = speed(tokens, peer_run(settings))
            print(f"TRL {name}: {tried[name]:.0f} tokens per CPU-second", flush=True)
        best = arguments.peer_setting or max(tried, key=tried.__getitem__, default="")
        mine, peer, apart = [], [], []
        for _ in range(arguments.rounds):
            own = run_ours(folder, model, reference, ours, steps)
            mine.append(speed(tokens, own))
            if best:
                run = peer_run(PEER_SETTINGS[best])
                peer.append(speed(tokens, run))
                apart.append((abs(own.losses[0] - run.losses[0]), furthest(own.losses, run.losses)))
                print(f"losses ours {own.losses} TRL {run.losses}", flush=True)
    print("| model | ours, tokens/CPU-s | TRL, tokens/CPU-s | ours / TRL, per round | first loss | all losses |")
    print("|---|---|---|---|---|---|")
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, peer))
    ours_speed = f"{statistics.median(mine):.0f}"
    theirs_speed = f"{statistics.median(peer):.0f} ({best})" if peer else "-"
    first, all_steps = (max((pair[i] for pair in apart), default=0.0) for i in range(2))
    print(f"| {arguments.size} | {ours_speed} | {theirs_speed} | {ratios} | {first:.1e} | {all_steps:.1e} |")
    figures = Figures()
    figures.add(arguments.size, compared(mine, peer) | {"the peer's setting": best or "absent"})
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
