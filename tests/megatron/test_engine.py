"""Real Megatron-Core over gloo: its own schedules, parallel layers and collectives, beside the plain engine."""

import socket
from contextlib import ExitStack

import pytest

from tests.harness.ranks import cells_on_demand
from tests.megatron import (
    adapter_cells,
    cells,
    family_cells,
    muon_cells,
    replay_cells,
    setting_cells,
    supervised_cells,
)
from tests.megatron.layouts import ADAPTERS, PARITY

pytestmark = pytest.mark.slow
OTHERS = {
    2: [
        cells.state_goes_to_the_plain_engine_and_back,
        cells.several_tokens,
        cells.folders_go_in_and_out,
        cells.layers_computed_again,
        cells.low_precision,
        cells.low_precision_of_shared_tokens,
        cells.refusals,
        setting_cells.settings_that_nothing_reads,
        setting_cells.rows_that_all_get,
        setting_cells.moved_to_the_host_in_between,
        setting_cells.the_loss_of_routers,
        supervised_cells.supervised_training,
        supervised_cells.training_on_pairs,
        adapter_cells.an_adapters_state_goes_elsewhere,
        adapter_cells.adapters_that_are_refused,
        adapter_cells.an_adapter_on_experts_goes_elsewhere,
        family_cells.the_state_of_halves_goes_elsewhere,
        muon_cells.muon_from_a_checkpoint,
    ],
    4: [cells.several_tokens, setting_cells.the_loss_of_routers],
}
REPLAYED = {
    2: [replay_cells.experts_and_tokens_shared, replay_cells.rows_padded_and_cut, replay_cells.a_dense_model],
    4: [replay_cells.virtual_stages_computed_again],
}
MUON = {
    2: [
        muon_cells.muon_on_cut_weights,
        muon_cells.muon_on_latent_attention_and_experts,
        muon_cells.muon_on_copies,
        muon_cells.muon_on_copies_of_their_own,
        muon_cells.muon_on_an_adapter,
    ],
    4: [muon_cells.muon_on_tensor_parallel_copies],
}
LIMIT = 1e-5
"""Relative, in float32; three optimizer steps."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    sets = (PARITY, OTHERS, ADAPTERS, REPLAYED, MUON)
    with ExitStack() as stack:
        by_size = {size: {size: [cell for cells in sets for cell in cells[size]]} for size in PARITY}
        yield {
            size: stack.enter_context(cells_on_demand(cells, folder / str(size)))[size]
            for size, cells in by_size.items()
        }


@pytest.mark.parametrize("size, cell", [(size, cell.__name__) for size in PARITY for cell in PARITY[size]])
def test_three_steps_equal_those_of_the_plain_engine(answers, size, cell):
    for found in answers[size][cell]:
        assert found["same bits"], "Hugging Face to Megatron-Core and back"
        assert found["outputs"] < LIMIT, found
        assert found["loss"] < LIMIT and found["norm"] < LIMIT, found
        assert found["weights"] < LIMIT, found
        assert found["routers"] < LIMIT and not found["metrics"], "the metrics are those of every engine"


@pytest.mark.parametrize(
    "size, cell, held",
    [
        (2, "data_parallel_with_the_distributed_optimizer", "rank 0 (NODE) differs from that on rank 1 (NODE)"),
        (2, "tensor_parallel", "rank 0 (NODE) differs from that on rank 1 (NODE)"),
        (2, "pipeline_parallel", "nothing: 0"),
        (4, "tensor_and_data_parallel", "rank 3 (NODE) differs from that on 3 other ranks"),
    ],
)
def test_a_flipped_bit_of_one_copy_of_a_weight_is_named_with_its_rank(answers, size, cell, held):
    for found in answers[size][cell]:
        compared, told = found["copies"]
        assert held.replace("NODE", socket.gethostname()) in told
        assert (compared > 0) == (not told.startswith("nothing")) and ("model/" in told or not compared)


@pytest.mark.parametrize(
    "size, cell, most",
    [
        (2, "tensor_parallel", 0.52),
        (2, "pipeline_parallel", 0.52),
        (2, "latent_attention_cut", 0.53),
        (2, "experts_shared", 0.85),
        (4, "tensor_and_pipeline_parallel", 0.4),
    ],
)
def test_a_rank_holds_its_part_of_the_weights_only(answers, size, cell, most):
    assert all(found["held"] < most for found in answers[size][cell])


@pytest.mark.parametrize("size, cell", [(size, cell.__name__) for size in REPLAYED for cell in REPLAYED[size]])
def test_recorded_experts_are_chosen_as_in_the_plain_engine(answers, size, cell):
    for found in answers[size][cell]:
        if cell == "a_dense_model":
            assert "no routers" in found
            continue
        assert 0.2 < found.pop("share") < 1, "most choices are not the routers' own"
        assert found.pop("free column") and found.pop("forced column"), "what a pass chose is what it records"
        assert all(error < LIMIT for error in found.values()), found


@pytest.mark.parametrize("size", OTHERS)
def test_several_tokens_per_position_are_those_of_the_plain_engine(answers, size):
    for of_layouts in answers[size]["several_tokens"]:
        assert all(error < LIMIT for errors in of_layouts for error in errors.values()), of_layouts


@pytest.mark.parametrize("size, cell", [(size, cell.__name__) for size in MUON for cell in MUON[size]])
def test_muon_makes_the_matrices_of_hugging_face_orthogonal_as_the_plain_engine_does(answers, size, cell):
    for found in answers[size][cell]:
        assert found["loss"] < LIMIT and found["norm"] < LIMIT and found["weights"] < LIMIT, found
        assert found["moved"] > 1e-3


def test_copies_share_the_momenta_of_muon_or_have_all_of_them(answers):
    """7 matrices of 2 layers: two ranks that share them have 14 together, and write as many where each has all."""
    shared, own = (
        sum(found["momenta"] for found in answers[2][f"muon_on_copies{name}"]) for name in ("", "_of_their_own")
    )
    assert shared == own == 14


def test_muon_goes_on_from_a_checkpoint_in_every_layout_and_in_the_plain_engine(answers):
    for found in answers[2]["muon_from_a_checkpoint"]:
        assert found.pop("again") == found["here"], "bit for bit"
        assert found == {name: pytest.approx(found["here"], rel=1e-5) for name in found}


def test_a_weight_in_halves_goes_on_elsewhere_and_where_it_was_cut_the_plain_engine_refuses_its_optimizer(answers):
    for found in answers[2]["the_state_of_halves_goes_elsewhere"]:
        for name in ("cut", "stages"):
            assert found[f"{name} elsewhere"] == pytest.approx(found[name], rel=1e-5)
    first = answers[2]["the_state_of_halves_goes_elsewhere"][0]
    assert first["stages plain"] == pytest.approx(first["stages"], rel=1e-5)
    assert "optimizer state has another shape" in first["cut refused"]


def test_layers_that_predict_further_tokens_are_left_out_and_said(answers):
    for found in answers[2]["latent_queries_as_they_are"]:
        assert any("1 weights of layers that predict further tokens" in text for text in found["said"]), found


def test_a_state_goes_on_in_the_plain_engine_and_in_another_layout(answers):
    for found in answers[2]["state_goes_to_the_plain_engine_and_back"]:
        for name in ("elsewhere", "plain"):
            if name in found:
                assert found[name] == pytest.approx([found["loss"], found["norm"]], rel=1e-5)


def test_a_converted_folder_is_trained_on_and_its_checkpoint_becomes_a_hugging_face_folder(answers):
    first, second = answers[2]["folders_go_in_and_out"]
    assert first["differs"] == [] and first["exported"] and second["exported"]
    assert first["files"] == 2, "one per process"
    assert first["moved"] and first["merged"]
    for number, found in enumerate((first, second), start=1):
        files = ["huggingface/model-{}.safetensors", "optimizer-{}.safetensors"]
        assert found["files of this rank"] == [file.format(f"0000{number}-of-00002") for file in files]


def test_activations_are_computed_again_as_often_as_asked_for(answers):
    """Two layers, two micro-batches: 4 calls; those that are dropped are made twice. The numbers stay."""
    for found in answers[2]["layers_computed_again"]:
        calls = {name: (each["layers"], each["attention"]) for name, each in found.items()}
        assert calls == {"None": (4, 4), "selective": (4, 8), "full": (8, 8)}
        assert found["None"]["told"] == found["selective"]["told"] == found["full"]["told"]


@pytest.mark.parametrize("cell", ["low_precision", "low_precision_of_shared_tokens"])
def test_bf16_weights_are_rounded_from_float32_copies(answers, cell):
    for found in answers[2][cell]:
        assert found["dtypes"] == ["torch.bfloat16"] and found["masters"] == ["torch.float32"]
        assert found["rounded"] and found["finer"]
        assert found["loss"] < 5e-3 and found["norm"] < 5e-3, "float32's, to the digits of bf16"


@pytest.mark.parametrize(
    "name, words",
    [
        ("layers", ("layers of a pipeline stage", "virtual_pipeline_model_parallel_size")),
        ("experts", ("without experts", "expert_model_parallel_size")),
        ("processes", ("2 processes", "1x1, 1x2, 2x1")),
        ("copies", ("2 copies of 1 x 1", "context_parallel_size", "Allowed: 1, 2")),
        ("padded", ("only where rows are packed", "use_remove_padding=true")),
        ("scores", ("padded rows does not bound its scores", "use_remove_padding")),
        ("routers", ("moe_router_load_balancing_type", "moe/load_balance")),
        ("Adafactor", ("optimizer", "looks at a weight as a whole")),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_what_can(answers, name, words):
    for found in answers[2]["refusals"]:
        for word in words:
            assert word in found[name], found


def test_every_accepted_setting_of_the_engine_is_read(answers):
    for found in answers[2]["settings_that_nothing_reads"]:
        assert found == []


def test_the_same_rows_on_all_ranks_give_what_rows_of_their_own_give(answers):
    data_ranks = []
    for found in answers[2]["rows_that_all_get"]:
        assert found["own"][:3] == found["same"][:3]
        data_ranks.append(found["same"][4])
    assert data_ranks == [[0, 1, True], [0, 1, False]], "one part for both, and the first is heard"


def test_offloading_in_between_changes_no_weight(answers):
    for found in answers[2]["moved_to_the_host_in_between"]:
        assert found == {"equal": True, "freed": True}


@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_of_routers_is_that_of_the_paper_in_every_layout(answers, size):
    for found in answers[size]["the_loss_of_routers"]:
        expected = found.pop("expected")
        assert found == {name: pytest.approx(expected, rel=1e-5) for name in found}
        assert expected[1] > 0.01


def supervised_numbers(told):
    """The metrics of a supervised run by step: what was computed, not how it was laid out."""
    layout = ("time", "padding", "sharing")
    return {step: {n: v for n, v in found.items() if not any(w in n for w in layout)} for step, found in told.items()}


@pytest.mark.parametrize("name", [cells.TENSOR, cells.PIPELINE])
def test_supervised_training_gives_the_curve_of_one_process_and_goes_on_from_its_checkpoint(answers, name):
    first, _ = answers[2]["supervised_training"]
    found, expected = supervised_numbers(first[name]), supervised_numbers(first["plain"])
    assert list(found) == list(expected) == ["1", "2", "3", "4"]
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-5), step
    assert "val/loss" in found["4"]
    again = supervised_numbers(first[f"{name} resumed"])
    assert again == {step: found[step] for step in ("3", "4")}


@pytest.mark.parametrize("program", ["dpo_trainer", "rm_trainer"])
def test_pairs_train_as_in_one_process(answers, program):
    first, _ = answers[2]["training_on_pairs"]
    found, expected = (supervised_numbers(first[f"{program} {name}"]) for name in (cells.TENSOR, "plain"))
    for step in ("1", "2"):
        assert found[step] == pytest.approx(expected[step], rel=1e-4, abs=1e-6), step
    assert expected["2"]["val/loss"] < expected["1"]["train/loss"]


@pytest.mark.parametrize("size, cell", [(size, cell.__name__) for size in ADAPTERS for cell in ADAPTERS[size]])
def test_adapters_start_as_the_plain_engines_do_and_train_as_they_do(answers, size, cell):
    for rank, found in enumerate(answers[size][cell]):
        assert found["same bits"], "peft's own draws"
        assert found["loss"] < LIMIT and found["norm"] < LIMIT, found
        assert found["adapter"] < LIMIT and found["merged"] < LIMIT and found["outputs"] < LIMIT, found
        assert found["moved"] > 0.1
        if "value" not in cell:  # whose head is trained besides
            assert found["base"] == 0.0, "the base says what the model said before the first step"
        # Each expert's part of a factor has a state of its own, which stays in this engine.
        own = [name for name in found["saved"] if name.startswith("optimizer/") and ".experts." in name]
        assert bool(own) == ("on_experts" in cell)
        random_states = [name for name in found["saved"] if name.startswith("extra/rng/")] + own
        assert found["saved"] == sorted(random_states), (
            f"rank {rank}: names of weights and optimizer are the plain engine's"
        )


def test_an_adapters_factors_are_cut_like_the_layers(answers):
    whole, half = (
        answers[2][name] for name in ("adapters_on_copies", "adapters_on_tensor_and_sequence_parallel_layers")
    )
    assert all(found["trained"] == 1.0 for found in whole)
    assert all(found["trained"] < 0.75 for found in half), "one factor of each is cut"
    assert sorted(found["trained"] for found in answers[2]["adapters_on_pipeline_stages"]) == [0.0, 1.0], (
        "the last layer"
    )


def test_an_adapters_state_goes_on_in_the_plain_engine_and_in_another_layout_and_its_file_is_an_adapter(answers):
    for found in answers[2]["an_adapters_state_goes_elsewhere"]:
        for name in ("elsewhere", "plain"):
            if name in found:
                assert found[name] == pytest.approx(found["here"], rel=1e-5)
        assert found["from its file"], "as lora_adapter_path"
    assert answers[2]["an_adapters_state_goes_elsewhere"][0]["files"] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_adapter_as_megatrons_users_spell_it_has_the_same_bits(answers):
    for found in answers[2]["an_adapters_state_goes_elsewhere"]:
        assert found["spelled otherwise"] == {"first": True, "next": True}


def test_an_adapter_on_routers_or_on_parts_of_experts_is_refused(answers):
    for found in answers[2]["adapters_that_are_refused"]:
        assert len(found) == 3
        assert all(
            "lora_rank" in text and "gate.weight is not built yet on Megatron-Core" in text for text in found[:2]
        )
        assert "expert_tensor_parallel_size=1" in found[2]


def test_an_adapter_on_experts_has_the_file_of_every_engine_and_an_optimizer_of_this_one(answers):
    for found in answers[2]["an_adapter_on_experts_goes_elsewhere"]:
        assert found["elsewhere"] == pytest.approx(found["here"], rel=1e-5)
        assert found["same file"] and found["outputs"] < 1e-5
        assert "belongs to another model" in found["refused"] and "[0]" in found["refused"]
