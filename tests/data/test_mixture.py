"""Sources in a ratio: exact shares at every place, the same order after a resume, refusals that say what to change."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import islice, product
from pathlib import Path

import pytest

from tests.harness.rows import addition_rows, write_prompts
from verl.config import DataConfig, replace
from verl.data import RLHFDataset, StatefulLoader, create_rl_sampler
from verl.data.loader import PromptSource
from verl.data.mixture import Mixture, fair_turns
from verl.errors import CheckpointError, ConfigError, DataError
from verl.metrics import notices, reset_notices

COUNTS = {"gsm8k": 4, "math": 6, "code": 10}
SHARES = {"gsm8k": 0.5, "math": 0.3, "code": 0.2}


@pytest.fixture
def dataset(tmp_path, tokenizer, monkeypatch):
    """20 rows: 0 to 3 of gsm8k, 4 to 9 of math, 10 to 19 of code."""
    monkeypatch.chdir(tmp_path)
    rows = [row for name, count in COUNTS.items() for row in addition_rows(count, name)]
    return RLHFDataset(write_prompts("train.jsonl", rows), tokenizer, DataConfig())


def order_of(dataset, epochs: int = 1, **settings) -> list[list[int]]:
    sampler, drawn = create_rl_sampler(DataConfig(**{"source_weights": SHARES, **settings}), dataset), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        drawn.append(list(sampler))
    return drawn


def source_of(item: int) -> str:
    return "gsm8k" if item < 4 else "math" if item < 10 else "code"


def loader(dataset, batch_size: int = 4, **settings) -> StatefulLoader:
    config = DataConfig(**{"source_weights": SHARES, "seed": 3, **settings})
    return StatefulLoader(dataset, batch_size, sampler=create_rl_sampler(config, dataset))


def rows_of(batches) -> list[list[int]]:
    return [batch["__row__"].tolist() for batch in batches]


def test_two_sources_take_turns_as_their_windows_say():
    # Windows of 2/3: places 0-1, 1-2, 3-4, 4-5; of 1/3: 0-2, 3-5. The earliest end goes first, the first source of two.
    assert fair_turns((Fraction(2, 3), Fraction(1, 3)), 6).tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "parts", [(1,), (1, 1), (5, 3, 2), (97, 2, 1), (7, 7, 7, 7, 1), (1, 2, 3, 4, 5, 6, 7), (50, 1, 1, 1, 1, 1, 1)]
)
def test_a_source_is_never_a_prompt_away_from_its_share(parts):
    shares = tuple(Fraction(part, sum(parts)) for part in parts)
    turns, drawn = fair_turns(shares, 3 * sum(parts)), Counter()
    for place, source in enumerate(turns.tolist(), start=1):
        drawn[source] += 1
        for number, share in enumerate(shares):
            assert math.floor(place * share) <= drawn[number] <= math.ceil(place * share)
    assert [drawn[number] for number in range(len(parts))] == [3 * part for part in parts]


def test_every_ten_prompts_have_five_three_and_two(dataset):
    for drawn in order_of(dataset, epochs=3):
        assert len(drawn) == 20
        for first in (0, 10):
            assert Counter(map(source_of, drawn[first : first + 10])) == {"gsm8k": 5, "math": 3, "code": 2}


def test_a_row_recurs_only_after_all_others_of_its_source(dataset):
    drawn = [item for epoch in order_of(dataset, epochs=6) for item in epoch]
    for name, rows in COUNTS.items():
        of_source = [item for item in drawn if source_of(item) == name]
        assert len(of_source) == 6 * 20 * SHARES[name]
        for first in range(0, len(of_source) - rows + 1, rows):
            assert len(set(of_source[first : first + rows])) == rows, "over the ends of epochs, too"


def test_without_shuffling_each_source_comes_in_its_order(dataset):
    (first, second) = order_of(dataset, epochs=2, shuffle=False)
    assert [item for item in first if item < 4] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [item for item in second if item < 4] == [2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert [item for item in first if item >= 10] == [10, 11, 12, 13]


def test_the_order_is_of_the_seed_and_not_of_how_weights_are_written(dataset):
    assert order_of(dataset, seed=1) == order_of(dataset, seed=1, source_weights=dict(reversed(SHARES.items())))
    assert order_of(dataset, seed=1) != order_of(dataset, seed=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_in_mid_epoch_continues_with_the_next_row(dataset, workers):
    straight = loader(dataset)
    expected = rows_of(straight) + rows_of(straight)
    run = loader(dataset)
    begun = rows_of(islice(run, 2))
    config = DataConfig(source_weights=SHARES, seed=3)
    resumed = StatefulLoader(dataset, 4, sampler=create_rl_sampler(config, dataset), num_workers=workers)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert begun + rows_of(resumed) + rows_of(resumed) == expected


def test_a_state_of_other_weights_is_refused(dataset):
    other = loader(dataset, source_weights={"gsm8k": 0.4, "math": 0.4, "code": 0.2})
    with pytest.raises(CheckpointError, match=r"the checkpoint's data had sources=.*'1/2', 4.*this run has .*'2/5', 4"):
        other.load_state_dict(loader(dataset).state_dict())
    plain = loader(dataset, source_weights={})
    with pytest.raises(CheckpointError, match=r"data\.source_weights.*had sources=.*, this run has no sources"):
        plain.load_state_dict(loader(dataset).state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint's data had no sources, this run has sources="):
        loader(dataset).load_state_dict(plain.state_dict())


def test_a_weight_of_zero_leaves_a_source_out(dataset):
    (drawn,) = order_of(dataset, source_weights={"gsm8k": 0.5, "math": 0.5, "code": 0})
    assert Counter(map(source_of, drawn)) == {"gsm8k": 5, "math": 5}, "an epoch has as many prompts as there are rows"


def test_thirds_may_be_rounded(dataset):
    third = dict.fromkeys(COUNTS, 0.333)
    assert Mixture.of(dataset, DataConfig(source_weights=third)).shares == (Fraction(1, 3),) * 3


def test_files_may_be_the_sources(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("a.jsonl", 2), ("b.jsonl", 6)):
        rows = [{key: value for key, value in row.items() if key != "data_source"} for row in addition_rows(count)]
        write_prompts(name, rows)
    of_files = RLHFDataset(["a.jsonl", "b.jsonl"], tokenizer, DataConfig())
    (drawn,) = order_of(of_files, source_weights={"a.jsonl": 0.5, "b.jsonl": 0.5})
    assert sorted(drawn[:4])[:2] == [0, 1], "each row of the short file once"
    assert [sum(item < 2 for item in drawn[first : first + 2]) for first in (0, 2, 4, 6)] == [1, 1, 1, 1]


def test_what_an_epoch_has_of_each_source_is_told(dataset):
    reset_notices()
    order_of(dataset)
    assert notices()["data.source_weights"] == (
        "an epoch of 20 prompts has 4 of code (0.4 x its 10 rows), 10 of gsm8k (2.5 x its 4 rows), "
        "6 of math (1 x its 6 rows)"
    )


def test_prompts_are_counted_by_source(dataset):
    mixture = Mixture.of(dataset, DataConfig(source_weights=SHARES))
    assert mixture.count([0, 3, 4, 19]) == {"code": 1, "gsm8k": 2, "math": 1}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"gsm8k": 0.5, "math": 0.3, "code": 0.1}, r"sum to 0\.9, not to 1.*code: 0\.1111"),
        ({"gsm8k": 2, "math": 1, "code": 1}, r"sum to 4, not to 1.*gsm8k: 0\.5, math: 0\.25"),
        ({"gsm8k": 1.5, "math": -0.3, "code": -0.2}, r"weight of 'math' is -0\.3, not a number from 0 to 1"),
        ({"gsm8k": 0.5, "math": math.nan, "code": 0.5}, r"weight of 'math' is nan"),
        ({"gsm8k": "a lot", "math": 0.5, "code": 0.5}, r"weight of 'gsm8k' is 'a lot'"),
        ({"gsm8k": True}, r"weight of 'gsm8k' is True"),
        ({"gsm8k": 0.0, "math": 0.0, "code": 0.0}, r"sum to 0, not to 1.*Give every source its share"),
    ],
)
def test_weights_that_are_no_shares_are_refused(dataset, weights, message):
    with pytest.raises(ConfigError, match=rf"data\.source_weights: .*{message}"):
        order_of(dataset, source_weights=weights)


def test_a_source_without_rows_and_rows_without_a_weight_are_refused(dataset):
    with pytest.raises(DataError, match=r"10 rows are of source 'code', which has no weight.*0 leaves its rows out"):
        order_of(dataset, source_weights={"gsm8k": 0.5, "math": 0.5})
    unknown = {**SHARES, "code": 0.1, "gsm8": 0.1}
    with pytest.raises(DataError, match=r"no row is of source 'gsm8'.*gsm8k"):
        order_of(dataset, source_weights=unknown)


def test_a_row_without_a_source_is_named(tmp_path, tokenizer):
    rows = [*addition_rows(2, "a"), {**addition_rows(1)[0], "data_source": None}]
    mixed = RLHFDataset(write_prompts(tmp_path / "mixed.jsonl", rows), tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"mixed\.jsonl, row 2: column 'data_source' names no source"):
        order_of(mixed, source_weights={"a": 1})


def test_a_dataset_that_names_no_sources_is_refused():
    with pytest.raises(ConfigError, match=r"list does not say of which source its rows are.*verl\.data\.RLHFDataset"):
        create_rl_sampler(DataConfig(source_weights={"a": 1}), [1, 2, 3])


def test_a_prompt_that_recurs_in_an_epoch_is_another_group(dataset):
    source = PromptSource(loader(dataset, batch_size=10))
    batches = [source.next_prompts() for _ in range(4)]
    places = [
        (epoch, int(row), uid)
        for epoch, batch in zip((0, 0, 1, 1), batches)
        for row, uid in zip(batch.non_tensor_batch["__row__"], batch.non_tensor_batch["uid"])
    ]
    assert max(Counter((epoch, row) for epoch, row, _ in places).values()) > 1
    assert len({uid for _, _, uid in places}) == 40
    resumed = PromptSource(loader(dataset, batch_size=10))
    first = PromptSource(loader(dataset, batch_size=10))
    first.next_prompts()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.next_prompts().non_tensor_batch["uid"].tolist() == batches[1].non_tensor_batch["uid"].tolist()


def test_fewer_rows_with_a_weight_than_a_batch_are_refused(dataset):
    with pytest.raises(DataError, match=r"the sampler draws 4 rows per epoch, fewer than one batch of 8"):
        loader(dataset, 8, source_weights={"gsm8k": 1, "math": 0, "code": 0})


def test_a_share_of_no_prompt_is_refused(dataset):
    weights = {"gsm8k": 0.5, "math": 0.48, "code": 0.02}
    with pytest.raises(DataError, match=r"an epoch of 20 prompts has none of source 'code'.*0\.02.*1/20 or more"):
        order_of(dataset, source_weights=weights)


class Shortened(RLHFDataset):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.dataframe = self.dataframe.select(range(2, len(self)))


def test_rows_that_a_subclass_left_out_have_no_file(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        write_prompts(name, addition_rows(4, name[0]))
    shortened = Shortened(["a.jsonl", "b.jsonl"], tokenizer, DataConfig())
    with pytest.raises(ConfigError, match=r"Shortened changed the number of rows.*values of data\.reward_fn_key"):
        order_of(shortened, source_weights={"a.jsonl": 0.5, "b.jsonl": 0.5})
    (drawn,) = order_of(shortened, source_weights={"a": 0.5, "b": 0.5})
    assert sum(item < 2 for item in drawn) == 3, "a column is read where it is"


def test_filtered_rows_are_of_their_source(tmp_path, tokenizer):
    Path(tmp_path / "keep.py").write_text("def keep_prompt(row):\n    return row['extra_info']['index'] % 2 == 1\n")
    rows = [row for name in ("a", "b") for row in addition_rows(4, name)]
    config = replace(DataConfig(source_weights={"a": 0.5, "b": 0.5}), **{"filter_function.path": f"{tmp_path}/keep.py"})
    filtered = RLHFDataset(write_prompts(tmp_path / "rows.jsonl", rows), tokenizer, config)
    mixture = Mixture.of(filtered, config)
    numbers = [[filtered[int(item)]["__row__"] for item in of] for of in mixture.items]
    assert numbers == [[1, 3], [5, 7]] == [of.tolist() for of in mixture.rows]
    assert [mixture.count([row]) for row in (3, 5)] == [{"a": a, "b": 1 - a} for a in (1, 0)]


def test_every_share_of_a_grid_is_exact_over_an_epoch():
    for parts in product((1, 2, 5), repeat=3):
        turns = fair_turns(tuple(Fraction(part, sum(parts)) for part in parts), sum(parts))
        assert Counter(turns.tolist()) == dict(enumerate(parts))
