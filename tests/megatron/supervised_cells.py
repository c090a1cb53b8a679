"""Supervised training on Megatron-Core's ranks, by its own loop: every rank is a controller."""

from __future__ import annotations

import shutil

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.training_programs import PROGRAMS, SAVE_AT, sft_arguments
from tests.megatron.cells import PIPELINE, SHIM, TENSOR
from verl import env
from verl.distributed import Ranks
from verl.trainer import dpo_trainer, launch, rm_trainer, sft_trainer

SFT = PROGRAMS["sft"]
BUILDERS = {
    "sft_trainer": sft_trainer.build_sft,
    "dpo_trainer": dpo_trainer.build_dpo,
    "rm_trainer": rm_trainer.build_rm,
}


def trained(ranks, program, root, words):
    """Metrics by step."""
    from verl.config import load_config
    from verl.engines.megatron.parallel import leave

    leave()
    env.set_value("VERL_FILE_LOGGER_PATH", str(root / "metrics.jsonl"))
    env.set_value("WORLD_SIZE", str(ranks.size))  # as torchrun sets it
    launch.run_checked(load_config(program, words), BUILDERS[program], ranks)
    ranks.barrier()
    return SFT.metrics(root)


def cut(name):
    return ["engine=megatron", f"engine.{name}=2", f"model.external_lib={SHIM}"]


def supervised_training(ranks, folder):
    """Four steps with tensor and with pipeline parallelism, and the last two of these again from the checkpoint."""
    inputs, found = folder / "sft", {}
    if ranks.is_first:
        inputs.mkdir()
        SFT.prepare(inputs)
        root = folder / "sft-plain"
        found["plain"] = trained(Ranks(), "sft_trainer", root, sft_arguments(inputs, root))
    ranks.barrier()
    for name in (TENSOR, PIPELINE):
        root, again = folder / f"sft-{name}", folder / f"sft-{name}-again"
        found[name] = trained(ranks, "sft_trainer", root, [*sft_arguments(inputs, root), *cut(name)])
        if ranks.is_first:
            shutil.copytree(root / f"global_step_{SAVE_AT}", again / f"global_step_{SAVE_AT}")
        ranks.barrier()
        found[f"{name} resumed"] = trained(ranks, "sft_trainer", again, [*sft_arguments(inputs, again), *cut(name)])
    return found


def training_on_pairs(ranks, folder):
    """Two steps of DPO and of a reward model, on five pairs at a time; the two ranks share each pair's rows."""
    inputs, found = folder / "pairs", {}
    if ranks.is_first:
        tiny_model_dir(inputs / "model", "qwen3")
        rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no " * (i % 3 + 1)} for i in range(10)]
        write_prompts(inputs / "pairs.jsonl", rows)
    ranks.barrier()
    for program in ("dpo_trainer", "rm_trainer"):
        words = [f"data.train_files={inputs}/pairs.jsonl", f"data.val_files={inputs}/pairs.jsonl",
                 "data.train_batch_size=5", "data.max_length=64", f"model.path={inputs}/model", "optim.lr=1e-2",
                 "optim.override_optimizer_config={eps: 1e-4}", "trainer.total_training_steps=2",
                 "trainer.test_freq=2", "trainer.logger=[file]"]  # fmt: skip
        for name, theirs, changes in (("plain", Ranks(), []), (TENSOR, ranks, cut(TENSOR))):
            root = folder / f"{program}-{name}"
            if theirs.size == ranks.size or ranks.is_first:
                found[f"{program} {name}"] = trained(
                    theirs, program, root, [*words, f"trainer.default_local_dir={root}", *changes]
                )
        ranks.barrier()
    return found
