import itertools
import math

import numpy as np
import pytest
import torch

from verl.errors import DataError
from verl.metrics import Metric, notices
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    process_validation_metrics,
    reduce_metrics,
)


def batch(**changes):
    """Prompts of 2 and 1 tokens; responses of 3 and 2 tokens (the middle one of the first is an observation)."""
    tensors = {
        "prompts": torch.zeros(2, 2, dtype=torch.long),
        "responses": torch.zeros(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
        "token_level_scores": torch.tensor([[0, 0, 1.0], [0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0, 0, 0.5], [0, 0, 0]]),
        "advantages": torch.tensor([[1.0, 99, 2], [3, 4, torch.nan]]),
        "returns": torch.tensor([[1.0, 99, 2], [3, 4, torch.nan]]),
        "values": torch.tensor([[1.0, 99, 2], [3, 5, torch.nan]]),
    }
    return DataProto.from_dict(tensors={**tensors, **changes}, non_tensors={"__num_turns__": np.array([2, 4])})


def test_batch_metrics_over_sequences_and_valid_tokens():
    found = compute_data_metrics(batch(), max_prompt_length=2, max_response_length=3)
    expected = {
        "critic/score/mean": 0.5,
        "critic/score/max": 1,
        "critic/rewards/mean": 0.25,
        "critic/advantages/mean": 2.5,
        "critic/advantages/max": 4,
        "critic/returns/min": 1,
        "critic/values/mean": 11 / 4,
        # returns - values = [0, 0, 0, -1]: variance 1/4; returns [1, 2, 3, 4]: variance 5/3
        "critic/vf_explained_var": 1 - 0.25 / (5 / 3 + 1e-5),
        "response_length/mean": 2.5,
        "response_length/max": 3,
        "response_length/clip_ratio": 0.5,
        "response_length_non_aborted/min": 2,
        "response/aborted_ratio": 0,
        "prompt_length/mean": 1.5,
        "prompt_length/clip_ratio": 0.5,
        "num_turns/min": 2,
        "num_turns/max": 4,
        "num_turns/mean": 3,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert all(math.isfinite(value) for value in found.values())
    assert not [name for name in compute_data_metrics(batch(), use_critic=False) if "value" in name or "vf_" in name]


def test_clip_ratio_counts_the_configured_length_and_not_the_width_of_the_batch():
    assert compute_data_metrics(batch(), max_response_length=512)["response_length/clip_ratio"] == 0


def test_an_aborted_sample_counts_in_lengths_only():
    attention = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    found = compute_data_metrics(batch(attention_mask=attention, response_mask=mask))
    assert found["response/aborted_ratio"] == 0.5 and found["critic/score/mean"] == 1
    assert found["response_length/mean"] == 1.5 and found["response_length_non_aborted/mean"] == 3
    nothing = compute_data_metrics(batch(attention_mask=attention[[1, 1]], response_mask=mask[[1, 1]]))
    assert nothing["response/aborted_ratio"] == 1 and all(map(math.isfinite, nothing.values()))


def test_times_and_times_per_token():
    found = compute_timing_metrics(batch(), {"gen": 1.0, "update_actor": 2.0, "testing": 3.0})
    assert found["timing_s/testing"] == 3 and found["timing_s/gen"] == 1
    assert found["timing_per_token_ms/gen"] == pytest.approx(1000 / 5)
    assert found["timing_per_token_ms/update_actor"] == pytest.approx(2000 / 8)
    assert "timing_per_token_ms/testing" not in found


def test_throughput_per_device():
    found = compute_throughout_metrics(batch(), {"step": 2.0}, n_gpus=4)
    assert found == {"perf/total_num_tokens": 8, "perf/time_per_step": 2, "perf/throughput": 1}
    counted = batch()
    counted.meta_info["global_token_num"] = [10, 30]
    assert compute_throughout_metrics(counted, {"step": 2.0}, 1)["perf/throughput"] == 20


def test_lists_are_reduced_by_what_the_last_part_of_the_name_says():
    values = [1.0, torch.tensor(3.0), np.float32(2.0)]
    names = ["actor/pg_loss", "critic/score/max", "critic/score/min", "perf/max_memory_allocated_gb",
             "global_seqlen/balanced_min", "global_seqlen/minmax_diff", "minority/share"]  # fmt: skip
    found = reduce_metrics(dict.fromkeys(names, values))
    assert list(found.values()) == [2, 3, 1, 3, 1, 2, 2]


def test_single_numbers_metrics_and_nan_are_reduced():
    found = reduce_metrics({"a": Metric(5, "sum"), "b": 2, "c": [1.0, float("nan")], "d": [Metric(1), Metric(2)]})
    assert found == {"a": 5, "b": 2, "c": 1, "d": 1.5}
    assert math.isnan(reduce_metrics({"a": [float("nan")]})["a"])


def test_bootstrap_of_a_constant_has_no_spread_and_of_two_values_the_known_mean():
    assert bootstrap_metric([2.0] * 4, 2, [max, min]) == [(2, 0), (2, 0)]
    (best, best_std), (worst, _) = bootstrap_metric([0.0, 1.0], 2, [max, min])
    # Two draws with replacement from {0, 1}: the better one is 1 with probability 3/4.
    assert (best, worst, best_std) == pytest.approx((0.75, 0.25, math.sqrt(3) / 4), abs=0.04)
    assert bootstrap_metric([0.0, 1.0], 2, [max], seed=1) == bootstrap_metric([0.0, 1.0], 2, [max], seed=1)
    assert bootstrap_metric([0.0, 1.0], 2, [max], n_bootstrap=7) != bootstrap_metric([0.0, 1.0], 2, [max])


def test_the_majority_answer_gives_the_value_and_ties_go_to_the_first():
    data = [{"pred": p, "val": v} for p, v in (("b", 0.0), ("a", 1.0), ("a", 1.0))]
    assert calc_maj_val(data, "pred", "val") == 1
    assert calc_maj_val(data[:2], "pred", "val") == 0


def test_validation_metrics_of_several_samples_per_prompt():
    sources = ["s"] * 8
    uids = ["p"] * 4 + ["q"] * 4
    infos = {"acc": [1, 0, 0, 0, 1, 1, 1, 1], "pred": list("abcd") + ["z"] * 4, "note": ["text"] * 8}
    found = process_validation_metrics(sources, uids, infos)["s"]
    assert set(found) == {"acc"}
    metrics = found["acc"]
    assert metrics["mean@4"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["std@4"] == pytest.approx(math.sqrt(3) / 4 / 2)
    # With one correct sample of four: P(at least one in k draws) = 1 - (3/4)^k; the other prompt is always right.
    assert metrics["best@2/mean"] == pytest.approx((1 - 0.75**2 + 1) / 2, abs=0.03)
    assert metrics["best@4/mean"] == pytest.approx((1 - 0.75**4 + 1) / 2, abs=0.03)
    assert metrics["worst@2/mean"] == pytest.approx((0.25**2 + 1) / 2, abs=0.03)
    assert {name for name in metrics if "@" in name and "/" in name} == {
        f"{kind}@{k}/{part}" for kind in ("best", "worst", "maj") for k in (2, 4) for part in ("mean", "std")
    }


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("right", range(3))
def test_pass_at_k_counts_the_subsets_that_hold_a_right_sample(n, right):
    infos = {"reward": [float(i < right) for i in range(n)], "turns": [1] * n}
    found = process_validation_metrics(["s"] * n, ["p"] * n, infos)["s"]
    for k in (k for k in (2, 4, n) if k <= n):
        subsets = list(itertools.combinations(range(n), k))
        holds = sum(min(subset) < right for subset in subsets)
        assert found["reward"][f"pass@{k}"] == pytest.approx(holds / len(subsets))
    assert not any(name.startswith("pass@") for name in found["turns"])


def test_pass_at_k_goes_by_the_accuracy_where_there_is_one():
    infos = {"reward": [0.6, -1.0, 1.0, 1.2], "acc": [True, False, None, None]}
    found = process_validation_metrics(["s"] * 4, ["p", "p", "q", "q"], infos)["s"]["reward"]
    assert found["pass@2"] == 1.0, "0.6 is a right answer that was too long"
    infos = {"reward": [0.9, 0.9, None, 1.0]}
    assert process_validation_metrics(["s"] * 4, ["p", "p", "q", "q"], infos)["s"]["reward"]["pass@2"] == 0.0


def test_vectorised_bootstrap_equals_the_public_function_draw_by_draw():
    accuracies, predictions = [1.0, 0.0, 1.0, 0.0], list("abab")
    infos = {"acc": accuracies, "pred": predictions}
    metrics = process_validation_metrics(["s"] * 4, ["p"] * 4, infos, seed=3)["s"]["acc"]
    data = [{"pred": p, "acc": a} for p, a in zip(predictions, accuracies)]
    best = lambda drawn: max(item["acc"] for item in drawn)
    majority = lambda drawn: calc_maj_val(drawn, "pred", "acc")
    for k in (2, 4):
        expected = bootstrap_metric(data, k, [best, majority], seed=3)
        found = [(metrics[f"{kind}@{k}/mean"], metrics[f"{kind}@{k}/std"]) for kind in ("best", "maj")]
        assert found == [pytest.approx(pair) for pair in expected]


def test_data_sources_and_single_samples_are_kept_apart():
    found = process_validation_metrics(["s", "s", "t"], ["a", "b", "c"], {"reward": [1.0, 0.0, 0.3]})
    assert found == {"s": {"reward": {"mean@1": 0.5}}, "t": {"reward": {"mean@1": 0.3}}}


def test_samples_without_a_value_are_left_out_and_a_shortfall_is_told():
    infos = {"acc": [1.0, None, float("nan"), 0.0], "reward": [1, 2, 3, 4]}
    found = process_validation_metrics(["s"] * 4, ["a", "a", "a", "b"], infos, expected_acc_counts={"s": 4})
    assert found["s"]["acc"]["mean@3"] == 1 and found["s"]["acc"]["mean@1"] == 0
    assert "3 of 4" in notices()["validation/s"]
    with pytest.raises(DataError, match="1 values of 'acc' for 2 validation samples"):
        process_validation_metrics(["s", "s"], ["a", "b"], {"acc": [1]})


def proxy_batch(**more) -> DataProto:
    # w = 1 - 2 pi + sum pi^2: row 0 (0.4, 0.1), row 1 (0.5); advantages 2 and -1; row 2 has no valid token
    pi = torch.tensor([[0.5, 0.8], [0.4, 0.9], [0.5, 0.5]])
    tensors = {
        "old_log_probs": pi.log(),
        "sum_pi_squared": torch.tensor([[0.4, 0.7], [0.3, float("nan")], [0.5, 0.5]]),
        "advantages": torch.tensor([[2.0, 2.0], [-1.0, 0.0], [0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]),
        **more,
    }
    return DataProto.from_dict(tensors=tensors)


def test_the_variance_proxies_follow_from_the_weights_of_each_response():
    # W = (0.5, 0.5), A^2 = (4, 1): P = (2 + 0.5) / 2 = 1.25; S = 0.25; (P - S) / (2 - 1) = 1
    found = compute_variance_proxy_metrics(proxy_batch(), gradient_norm=0.5)
    expected = {
        "proxy1_signal_strength": 0.25,
        "proxy2_total_power": 1.25,
        "proxy3_pure_noise": 1.0,
        "expected_a_squared": 2.5,
        "expected_w": 0.5,
    }
    assert found == pytest.approx({f"variance_proxy/{name}": value for name, value in expected.items()}, abs=1e-6)


def test_importance_weights_enter_the_variance_proxies_squared():
    weights = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    found = compute_variance_proxy_metrics(proxy_batch(rollout_is_weights=weights))
    assert found["variance_proxy/proxy2_total_power"] == pytest.approx((0.4 * 4 * 4 + 0.5) / 2, abs=1e-6)
    assert "variance_proxy/proxy1_signal_strength" not in found


def test_without_the_sum_of_squares_there_is_no_proxy():
    batch = proxy_batch()
    del batch.batch["sum_pi_squared"]
    assert compute_variance_proxy_metrics(batch, 1.0) == {}
