"""Upstream's helpers do what their names say: numbers by hand, or from torch."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
import torch
from omegaconf import OmegaConf

from tests.harness.programs import python
from verl.registry import ADVANTAGE_ESTIMATORS
from verl.utils import as_torch_index, group_mean_std


def test_the_device_has_one_name_everywhere():
    from verl.utils import device

    kind = device.get_device_name()
    assert torch.zeros(1).to(device.get_device_id()).device.type == kind
    assert device.get_torch_device() is torch.get_device_module(kind)
    assert device.get_nccl_backend() == {"cuda": "nccl", "cpu": "gloo"}[kind]
    assert device.is_cuda_available is torch.cuda.is_available()


def test_folders_and_files_of_this_machine_go_through_the_helpers_for_hdfs(tmp_path):
    from verl.errors import DataError, MissingDependencyError
    from verl.utils import hdfs_io
    from verl.utils.fs import local_mkdir_safe

    hdfs_io.makedirs(str(tmp_path / "a/b"), exist_ok=True)
    (tmp_path / "file.txt").write_text("x")
    hdfs_io.copy(str(tmp_path / "file.txt"), str(tmp_path / "a/b"))
    assert hdfs_io.exists(str(tmp_path / "a/b/file.txt")) and not hdfs_io.exists(str(tmp_path / "none"))
    assert local_mkdir_safe(str(tmp_path / "c/d")) == str(tmp_path / "c/d") and (tmp_path / "c/d").is_dir()
    with pytest.raises(MissingDependencyError, match="needs the command 'hdfs'"):
        hdfs_io.makedirs("hdfs://there/folder")
    with pytest.raises(DataError, match="cannot read s3"):
        hdfs_io.makedirs("s3://there/folder")


def test_values_are_appended_under_a_prefix_and_lists_are_joined():
    from verl.utils.py_functional import append_to_dict

    data = {"actor/loss": [1]}
    append_to_dict(data, {"loss": 2, "actor/loss": [3, 4], "lr": 5}, prefix="actor/")
    assert data == {"actor/loss": [1, 2, 3, 4], "actor/lr": [5]}


def test_containers_of_omegaconf_become_ordinary_ones():
    from verl.utils.py_functional import convert_to_regular_types

    plain = convert_to_regular_types(
        {"a": OmegaConf.create({"b": [1, {"c": 2}]}), "d": (OmegaConf.create([3]), 4), "e": "x"}
    )
    assert plain == {"a": {"b": [1, {"c": 2}]}, "d": [[3], 4], "e": "x"} and type(plain["a"]["b"]) is list


def test_a_call_over_its_time_is_an_error_and_one_within_it_returns():
    from verl.utils.py_functional import timeout_limit

    assert timeout_limit(5)(lambda x: x + 1)(2) == 3
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"):
        timeout_limit(0.05)(time.sleep)(0.5)


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", torch.bfloat16])
def test_a_precision_has_many_spellings(spelling):
    from verl.utils.torch_dtypes import PrecisionType

    assert PrecisionType.to_dtype(spelling) is torch.bfloat16 and PrecisionType.is_bf16(spelling)
    assert PrecisionType.to_dtype(16) is torch.float16 and PrecisionType.is_fp32(32)
    assert PrecisionType.to_str(torch.bfloat16) == "bf16" and not PrecisionType.supported_type("int8")


def test_padding_is_taken_out_and_put_back():
    from verl.utils.attention_utils import pad_input, unpad_input

    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]])
    rows = torch.arange(18.0).reshape(3, 3, 2).requires_grad_()
    flat, indices, starts, longest, lengths = unpad_input(rows, mask)
    assert indices.tolist() == [0, 1, 4, 5, 6] and starts.tolist() == [0, 2, 4, 5] and longest == 2
    assert lengths.tolist() == [2, 2, 1] and torch.equal(flat, rows.flatten(0, 1)[indices])
    assert torch.equal(pad_input(flat, indices, 3, 3), rows * mask[..., None])
    flat.sum().backward()
    assert torch.equal(rows.grad, mask[..., None].expand(3, 3, 2).float())


def test_a_function_that_goes_away_warns_at_its_caller():
    from verl.utils.import_utils import deprecated

    with pytest.warns(FutureWarning, match="deprecated; use other"):
        assert deprecated("other")(lambda: 5)() == 5


def test_seconds_of_a_block_add_up():
    from verl.utils.debug import marked_timer
    from verl.utils.profiler import simple_timer

    seconds: dict[str, float] = {}
    for timer in (simple_timer, marked_timer):
        with timer("gen", seconds):
            time.sleep(0.02)
    assert 0.04 <= seconds["gen"] < 2


def test_seconds_of_one_process_are_reduced_to_themselves(monkeypatch):
    from verl.compat.forms import profiling
    from verl.utils.profiler.performance import gather_timing, reduce_timing, topk_reduce_ratio_min_max

    monkeypatch.setattr(profiling.dist, "is_initialized", lambda: False)  # another test may have left a group
    assert gather_timing({"gen": 2.0}) == {"gen": [2.0]} and reduce_timing({"gen": 2.0}) == {"gen": 2.0}
    assert topk_reduce_ratio_min_max(2.0) == (-1.0, -1.0, -1.0)


def test_seconds_of_several_ranks_are_reduced_as_they_are_asked_to_be(monkeypatch):
    from verl.compat.forms import profiling

    seconds = [*map(float, range(1, 10)), 100.0]  # of ten ranks: the slowest tenth is one of them
    monkeypatch.setattr(profiling, "gather_timing", lambda timing: dict.fromkeys(timing, seconds))
    monkeypatch.setattr(profiling.dist, "is_initialized", lambda: True)
    assert profiling.reduce_timing({"gen": 1.0}) == {"gen": 14.5}
    assert profiling.reduce_timing({"gen": 1.0}, profiling.dist.ReduceOp.MAX) == {"gen": 100.0}
    assert profiling.topk_reduce_ratio_min_max(1.0) == pytest.approx((0.1, 1.0, 100.0))
    assert profiling.topk_reduce_ratio_min_max(1.0, k=50)[0] == pytest.approx(0.5)


JOINS = """
import torch
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
assert initialize_global_process_group(timeout_second=60) == (0, 0, 1)
destroy_global_process_group()
assert not torch.distributed.is_initialized()
"""


def test_a_process_group_is_joined_at_the_address_that_the_shell_names(tmp_path):
    named = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{tmp_path}/group"}
    python("-c", JOINS, **named)


def test_memory_is_logged_before_and_after_a_call(caplog):
    from verl.utils.profiler import GPUMemoryLogger

    logger = logging.getLogger("a.role")
    with caplog.at_level(logging.INFO, logger="a.role"):
        assert GPUMemoryLogger("actor", logger, logging.INFO)(abs)(-3) == 3
    assert [m.partition(",")[0] for m in caplog.messages] == ["Before actor abs", "After actor abs"]
    assert "host_gb" in caplog.text


def test_a_profiler_records_only_where_it_is_asked_to():
    from types import SimpleNamespace

    from verl.utils.profiler import DistProfiler

    off, on = DistProfiler(0), DistProfiler(1, SimpleNamespace(enable=True, all_ranks=False, ranks=[1]))
    for profiler in (off, on):
        profiler.start()
        DistProfiler.annotate("mine")(torch.ones)(2)
        profiler.stop()
    assert off.profiler is None and "mine" in {event.name for event in on.profiler.events()}


def test_a_worker_starts_and_stops_its_profiler_by_methods_that_it_may_override():
    from types import SimpleNamespace

    from verl.utils.profiler import DistProfilerExtension

    class Worker(DistProfilerExtension):
        def start_profile(self, **kwargs):
            super().start_profile(step=3, **kwargs)

    said = []
    profiler = SimpleNamespace(start=lambda **kwargs: said.append(kwargs), stop=lambda: said.append("stop"))
    worker = Worker(profiler)
    worker.start_profile(role="actor")
    worker.stop_profile()
    assert said == [{"step": 3, "role": "actor"}, "stop"]


def test_messages_bear_their_rank(caplog):
    from verl.utils.logger import LocalLogger, log_with_rank

    with caplog.at_level(logging.INFO):
        log_with_rank("up", 3, logging.getLogger("x"))
        log_with_rank("hidden", 3, logging.getLogger("x"), log_only_rank_0=True)
    assert caplog.messages == ["[Rank 3] up"]
    LocalLogger().flush()


def test_a_step_is_printed_in_one_line(capsys):
    from verl.utils.logger import LocalLogger

    LocalLogger().log({"loss": 0.5}, step=2)
    assert capsys.readouterr().out == "step:2 - loss:0.5\n"


def test_groups_are_numbered_as_they_come_and_one_alone_keeps_its_score():
    numbers = as_torch_index(["b", "a", "b", "c"])
    mean, std, count = group_mean_std(torch.tensor([1.0, 5.0, 3.0, 7.0]), numbers)
    assert numbers.tolist() == [0, 1, 0, 2] and count.tolist() == [2, 1, 1]
    assert mean.tolist() == [2, 0, 0] and std.tolist() == pytest.approx([2**0.5, 1, 1])


def test_a_registry_can_be_emptied_and_filled_again():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est

    known, builtins = ADV_ESTIMATOR_REGISTRY.copy(), ADVANTAGE_ESTIMATORS.builtin_targets()
    try:
        ADV_ESTIMATOR_REGISTRY.clear()
        with pytest.raises(ValueError, match="unknown advantage estimator"):
            get_adv_estimator_fn("grpo")
        mine = register_adv_est("mine")(lambda: None)
        assert dict(ADV_ESTIMATOR_REGISTRY) == {"mine": mine} and get_adv_estimator_fn("mine") is mine
    finally:
        ADV_ESTIMATOR_REGISTRY.clear()
        ADV_ESTIMATOR_REGISTRY.update(known)
    assert dict(ADV_ESTIMATOR_REGISTRY) == known and get_adv_estimator_fn("grpo") is known["grpo"]
    assert ADVANTAGE_ESTIMATORS.builtin_targets() == builtins


def test_a_step_before_the_machine_is_taken_away_is_saved(monkeypatch):
    from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

    assert not should_save_ckpt_esi(100)
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 200))
    assert should_save_ckpt_esi(150) and should_save_ckpt_esi(100, redundant_time=50)
    assert not should_save_ckpt_esi(100) and not should_save_ckpt_esi(0)


def test_a_batch_holds_columns_and_values_of_its_own():
    from verl.utils.tensordict_utils import get, get_non_tensor_data, get_tensordict

    made = get_tensordict({"ids": torch.ones(2, 3), "names": ["a", "b"]}, {"temperature": 0.5})
    assert made.batch_size == torch.Size([2]) and get(made, "ids").shape == (2, 3)
    assert get(made, "names") == ["a", "b"] and get_non_tensor_data(data=made, key="temperature", default=1) == 0.5
    assert get(made, "nothing", 7) == 7
    with pytest.raises(AssertionError, match="one length"):
        get_tensordict({"a": torch.ones(2), "b": [1]})


def test_tokens_are_padded_so_that_ranks_divide_them():
    from verl.utils.ulysses import ulysses_pad

    ids, positions, added = ulysses_pad(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), sp_size=2)
    assert ids.tolist() == [[5, 6, 7, 0]] and positions.tolist() == [[0, 1, 2, 0]] and added == 1


def test_a_picture_is_opened_in_rgb_from_every_form(tmp_path):
    from PIL import Image

    from verl.utils.dataset.vision_utils import process_image

    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    forms = [Image.new("L", (3, 2)), {"bytes": (tmp_path / "a.png").read_bytes()}, {"image": str(tmp_path / "a.png")}]
    assert [(process_image(form).mode, process_image(form).size) for form in forms] == [("RGB", (3, 2))] * 3


def test_trajectories_are_numbered_per_prompt():
    from verl.experimental.agent_loop.agent_loop import get_trajectory_info

    rows = asyncio.run(get_trajectory_info(4, [7, 7, 9], False))
    assert [(row["sample_index"], row["rollout_n"]) for row in rows] == [(7, 0), (7, 1), (9, 0)]
    assert {row["step"] for row in rows} == {4}


def test_a_file_of_settings_is_found_from_here_and_from_the_package(tmp_path, monkeypatch):
    from verl.experimental.agent_loop.utils import resolve_config_path

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    assert resolve_config_path("a.yaml") == str(tmp_path / "a.yaml")
    assert resolve_config_path("verl/__init__.py").endswith("verl/__init__.py")
    with pytest.raises(FileNotFoundError, match="there is neither"):
        resolve_config_path("b.yaml")


def test_a_wrapped_megatron_model_is_unwrapped():
    from types import SimpleNamespace

    from verl.utils.megatron.pipeline_parallel import make_batch_generator
    from verl.utils.megatron_utils import get_model_config, unwrap_model

    inner = SimpleNamespace(config="c")
    wrapped = SimpleNamespace(module=SimpleNamespace(module=inner))
    assert unwrap_model([wrapped]) == [inner] and get_model_config(wrapped) == "c"
    assert list(make_batch_generator([1, 2], 1)) == [1, 2]
    assert [list(stage) for stage in make_batch_generator([1, 2], 2)] == [[1, 2], [1, 2]]


def test_a_section_of_ones_own_is_a_dataclass_and_a_mapping_whose_fields_are_set_once():
    from dataclasses import FrozenInstanceError, dataclass, field

    from verl.base_config import BaseConfig
    from verl.utils.config import omega_conf_to_dataclass

    @dataclass
    class Weights(BaseConfig):
        _mutable_fields = frozenset({"step"})

        step: int
        names: list = field(default_factory=list)

    made = omega_conf_to_dataclass(OmegaConf.create({"step": 3, "names": ["a"]}), Weights)
    assert dict(made) == {"step": 3, "names": ["a"]} and made["step"] == made.step and made.get("no", 5) == 5
    made.step = 4
    with pytest.raises(FrozenInstanceError, match=r"Weights\.names is set once"):
        made.names = []
    assert made.step == 4 and "no" not in made and Weights(step=1) == Weights(step=1)
