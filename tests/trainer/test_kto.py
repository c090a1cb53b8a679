"""KTO by its command: its reference point, and what its rows may not be; a user's loss of pairs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.configs import refused
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.runs import logged
from verl.checkpoint.provenance import Provenance
from verl.config import load_config
from verl.data.preference import UnpairedDataset, _with_answer_of
from verl.errors import ConfigError, DataError
from verl.metrics import notices, reset_notices
from verl.trainer import dpo_trainer

WORDS = [
    "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=12", "data.max_length=64",
    "model.path=model", "optim.lr=5e-3", "trainer.total_training_steps=8", "trainer.test_freq=4",
    "trainer.logger=[file]",
]  # fmt: skip
KTO = "dpo.loss_type=kto"


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    draw = random.Random(0)
    for name, count in (("train", 48), ("val", 16)):
        rows, pairs = [], []
        for _ in range(count):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            good, bad = f"{a + b} ok", f"no idea {b}"
            label = draw.random() < 0.5
            rows.append({"prompt": f"{a}+{b}=", "completion": good if label else bad, "label": label})
            pairs.append({"prompt": f"{a}+{b}=", "chosen": good, "rejected": bad})
        write_prompts(f"{name}.jsonl", rows)
        write_prompts(f"{name}_pairs.jsonl", pairs)
    return workplace


def train(name: str, *changes: str) -> list[dict]:
    words = [*WORDS, f"trainer.default_local_dir={name}", f"trainer.experiment_name={name}", *changes]
    assert dpo_trainer.main(words) == 0
    return logged("logs", name)


def weights(name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(f"{name}/global_step_{step}/model/huggingface/model.safetensors")


def test_desirable_answers_gain_on_undesirable_ones_that_are_not_in_the_file(here):
    steps = train("kto", KTO)
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-5), "policy and reference are one: s(0) of every row"
    assert steps[0]["train/kl"] == pytest.approx(0.0, abs=1e-4)
    last = steps[-1]
    assert last["val/rewards/chosen"] > last["val/rewards/rejected"] + 0.1 and last["val/loss"] < 0.5


def test_the_weights_scale_the_losses_of_their_rows(here):
    """At first every row has s(0) = 1/2, and the loss gives the share p of desirable rows: (2 p + 1 - p) / 2."""
    plain, heavy = (train(str(w), KTO, f"dpo.desirable_weight={w}", "trainer.total_training_steps=1") for w in (1, 2))
    share = 2 * heavy[0]["train/loss"] - 1
    assert plain[0]["train/loss"] == pytest.approx(0.5, abs=1e-5)
    assert 12 * share == pytest.approx(round(12 * share), abs=1e-3) and 0 < share < 1


def test_micro_batches_and_padding_change_nothing_but_rounding(here):
    runs = [
        train("through", KTO),
        train("small", KTO, "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2"),
        train("padded", KTO, "model.use_remove_padding=false"),
    ]
    for steps in zip(*runs, strict=True):
        for name in ("train/loss", "train/kl", "train/grad_norm"):
            assert [step[name] for step in steps[1:]] == pytest.approx([steps[0][name]] * 2, rel=2e-3, abs=1e-5), name


def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(here):
    train("straight", KTO, "trainer.save_freq=4")
    train("stopped", KTO, "trainer.save_freq=4", "trainer.total_training_steps=4", "optim.total_training_steps=8")
    train("stopped", KTO, "trainer.save_freq=4", "optim.total_training_steps=8")
    ours, theirs = weights("stopped", 8), weights("straight", 8)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_beside_lora_the_reference_is_the_model_without_its_adapter(here):
    steps = train("lora", KTO, "model.lora_rank=4")
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-5) and steps[-1]["train/loss"] < 0.5


def test_each_row_is_followed_by_its_prompt_with_the_answer_before(here):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    dataset = UnpairedDataset("train.jsonl", tokenizer, {"max_length": 64})
    rows = [dataset[item] for item in range(3)]
    batch = dataset.collate(rows)

    def texts(number: int) -> tuple[str, str]:
        ids, trained = batch["input_ids"][number], batch["loss_mask"][number].bool()
        end = int(batch["attention_mask"][number].sum())
        start = int(trained.nonzero()[0])
        return tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:end])

    prompts, answers = zip(*(texts(2 * row) for row in range(3)))
    assert [texts(2 * row + 1) for row in range(3)] == [(prompts[row], answers[row - 1]) for row in range(3)]
    assert batch["label"].tolist() == [bool(row["label"]) for row in rows for _ in range(2)]
    with pytest.raises(DataError, match="a batch of one row"):
        dataset.collate(rows[:1])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "neither true nor false"),
        ({"prompt": "a", "completion": "b"}, "label"),
        ({"prompt": "a", "answer": "b", "label": True}, "completion"),
        ({"prompt": "a", "completion": " ", "label": True}, "the answer is empty"),
    ],
)
def test_rows_that_are_not_judged_answers_are_refused_with_their_place(here, row, says, capsys):
    write_prompts("train.jsonl", [row] * 12)
    assert dpo_trainer.main([*WORDS, KTO]) == 2
    printed = capsys.readouterr().err
    assert says in printed and "train.jsonl" in printed


def test_labels_that_are_all_the_same_give_a_notice(here, caplog):
    write_prompts("train.jsonl", [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": True} for n in range(12)])
    train("one", KTO, "trainer.total_training_steps=1")
    assert "data.label_key: all 12 answers of train.jsonl are desirable" in caplog.text


def test_rows_with_labels_are_answers_in_messages_and_read_twice(here, monkeypatch):
    from transformers import AutoTokenizer

    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1) if n else " ", "label": True} for n in range(4)]
    write_prompts("train.jsonl", rows)
    reset_notices()
    tokenizer = AutoTokenizer.from_pretrained("model")
    data = UnpairedDataset("train.jsonl", tokenizer, {"max_length": 64, "filter_invalid": True})
    assert len(data) == 3 and "1 of 4 answers are left out" in notices()["data.filter_invalid"]
    assert "all 3 answers of train.jsonl are desirable" in notices()["data.label_key"]
    reads: list[int] = []
    table = type(data.dataframe)
    read = table.__getitem__
    with monkeypatch.context() as changed:
        changed.setattr(table, "__getitem__", lambda self, row: (reads.append(row), read(self, row))[1])
        data._check_rows(True)
    assert sorted(reads) == [0, 0, 1, 1, 2, 2, 3, 3], "once to measure it, once to check it with its label"
    write_prompts("train.jsonl", rows[:1])
    with pytest.raises(DataError, match="no answers are left to learn from"):
        UnpairedDataset("train.jsonl", tokenizer, {"max_length": 64, "filter_invalid": True})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([KTO, "data.train_batch_size=1"], "one row has none"),
        ([KTO, "dpo.reference_free=true"], "KTO does without it"),
        ([KTO, "dpo.precompute_ref_log_probs=true"], "KTO does without it"),
        ([KTO, "dpo.loss_fn=mine.py:loss"], "KTO does without it"),
        (["dpo.loss_type=ipo", "dpo.loss_fn=mine.py:loss"], "takes the place of dpo.loss_type=ipo"),
        (["dpo.loss_fn=mine"], "not the path of a function"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(here, words, says):
    from verl.config import load_config

    assert says in refused(load_config, "dpo_trainer", [*WORDS, *words])


def test_a_last_batch_of_one_row_is_refused_before_the_first_step(here, capsys):
    assert dpo_trainer.main([*WORDS, KTO, "data.val_max_samples=13"]) == 2
    assert "data.val_files" in capsys.readouterr().err


MINE = """
import torch.nn.functional as F

def loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected):
    h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    return -F.logsigmoid(0.1 * h), {"mine": h.detach()}

def mean(*four):
    return four[0].mean(), {}

def alone(*four):
    return four[0] - four[1]

number = 3
"""
PAIRS = ("data.train_files=train_pairs.jsonl", "data.val_files=val_pairs.jsonl")


def test_a_users_loss_gives_the_numbers_of_the_built_in_one(here):
    Path("mine.py").write_text(MINE)
    built_in, users = train("built_in", *PAIRS), train("users", *PAIRS, "dpo.loss_fn=mine.py:loss")
    for theirs, ours in zip(built_in, users, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-6)
        assert ours["train/mine"] == pytest.approx(10 * theirs["train/rewards/margins"], abs=1e-4)
    assert "val/mine" in users[-1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine.py:mean", "mine.py:mean returns other shapes"),
        ("mine.py:alone", "mine.py:alone returns other shapes"),
        ("mine.py:number", "not a function"),
        ("mine.py:none", "has no 'none'"),
        ("no_such_package.mod:loss", "no_such_package"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_by_its_name(here, name, says, capsys):
    Path("mine.py").write_text(MINE)
    assert dpo_trainer.main([*WORDS, *PAIRS, f"dpo.loss_fn={name}"]) == 2
    assert says in capsys.readouterr().err


def test_the_name_of_a_users_loss_is_a_setting(here):
    with pytest.raises(ConfigError, match="loss_fm"):
        from verl.config import load_config

        load_config("dpo_trainer", [*WORDS, "dpo.loss_fm=mine.py:loss"])


def test_a_mismatched_answer_ends_at_the_length_limit():
    row = {name: torch.ones(6, dtype=torch.long) for name in ("input_ids", "attention_mask", "loss_mask")}
    row["loss_mask"][:4] = 0
    other = {name: torch.full((9,), 2) for name in ("input_ids", "attention_mask", "loss_mask")}
    other["loss_mask"] = torch.tensor([0] * 2 + [1] * 7)
    joined = _with_answer_of(row, other, 8)
    assert (
        joined["input_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2] and joined["loss_mask"].tolist() == [0] * 4 + [1] * 4
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dpo.loss_fn=mine.py:loss", "dpo.label_smoothing=0.1"], "label_smoothing: only sigmoid and cpo have it"),
        (["trainer.best_metric=val/loss", "trainer.save_freq=1", "trainer.test_freq=1", "data.val_files=null"],
         "best_metric: checkpoints are compared by validations, and there are no files"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(here, words, said):
    Path("mine.py").write_text("def loss(*log_probs):\n    return log_probs[0], {}\n")
    assert said in refused(load_config, "dpo_trainer", [*WORDS, *words])


def test_columns_of_the_other_form_of_rows_get_a_notice(here):
    reset_notices()
    load_config("dpo_trainer", [*WORDS, KTO, "data.chosen_key=better"])
    assert notices()["data.chosen_key"] == "has no effect with dpo.loss_type=kto"
    load_config("dpo_trainer", [*WORDS, "data.label_key=good"])
    assert notices()["data.label_key"] == "has no effect without dpo.loss_type=kto"


def test_a_resumed_run_notices_an_edited_loss(here):
    Path("mine.py").write_text("def loss(*log_probs):\n    return log_probs[0], {}\n")
    config = load_config("dpo_trainer", [*WORDS, "dpo.loss_fn=mine.py:loss"])
    before = Provenance.of(config).content["dpo.loss_fn"]
    Path("mine.py").write_text("def loss(*log_probs):\n    return log_probs[1], {}\n")
    assert Provenance.of(config).content["dpo.loss_fn"] != before
