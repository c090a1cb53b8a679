"""``python -m verl.trainer.dpo_trainer key=value ...``: direct preference optimisation on pairs of answers.

On several processes: ``torchrun --nproc_per_node=N -m verl.trainer.dpo_trainer key=value ...``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config import DPOTrainerConfig
from verl.data.look import look_at_pairs
from verl.errors import ConfigError, DataError
from verl.registry import load_from_module, load_object
from verl.trainer import launch

if TYPE_CHECKING:
    from verl.algorithms.preference import PairFunction
    from verl.protocol.tokenizer import Tokenizer
    from verl.single_controller.spmd import Spmd
    from verl.trainer.pairs import DPOTrainer


def build_dpo(config: DPOTrainerConfig, tokenizer: Tokenizer, ctx: Spmd) -> DPOTrainer:
    """The trainer of a checked configuration."""
    from verl.algorithms.preference import DPOLoss, KTOLoss
    from verl.data import create_preference_datasets, processor_of
    from verl.trainer.pairs import DPOTrainer, KTOTrainer

    dpo = config.dpo
    function = None if dpo.loss_fn is None else (dpo.loss_fn, pair_function(dpo.loss_fn))
    processor = processor_of(config.model, tokenizer, config.data.mm_processor_kwargs)
    train, val = create_preference_datasets(config.data, tokenizer, processor, unpaired=dpo.loss_type == "kto")
    if dpo.loss_type == "kto":
        if val is not None and (len(val) == 1 or len(val) % min(config.data.train_batch_size, len(val)) == 1):
            fix = "Change data.train_batch_size or data.val_max_samples."
            message = "the last batch would have one row, and KTO takes its reference point from mismatched ones"
            raise DataError(message, key="data.val_files", got=f"{len(val)} rows", fix=fix)
        kto = KTOLoss(dpo.beta, (dpo.desirable_weight, dpo.undesirable_weight))
        return KTOTrainer(config, tokenizer, train, val, train.collate, kto, ctx)
    loss = DPOLoss(
        dpo.beta,
        dpo.loss_type,
        dpo.label_smoothing,
        dpo.length_normalised,
        dpo.reference_free,
        dpo.simpo_gamma,
        dpo.sft_coef,
        function,
    )
    return DPOTrainer(config, tokenizer, train, val, train.collate, loss, ctx)


def pair_function(path: str) -> PairFunction:
    """The function behind ``my_pkg.my_mod:name`` or ``file.py:name`` (``dpo.loss_fn``)."""
    place, _, name = path.rpartition(":")
    loaded: PairFunction = load_from_module(place, name) if place.endswith(".py") else load_object(path)
    if not callable(loaded):
        allowed = "my_pkg.my_mod:my_loss, or file.py:my_loss"
        raise ConfigError("not a function", key="dpo.loss_fn", got=path, allowed=allowed)
    return loaded


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return launch.main("dpo_trainer", build_dpo, look_at_pairs, argv)


if __name__ == "__main__":
    sys.exit(main())
