"""Divergences between student and teacher, and the actor's objective with a teacher; numbers from float64 sums."""

import math

import numpy as np
import pytest
import torch

from tests.harness.algorithms import loss_batch, poison
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.distillation import (
    DistilledPolicyLoss,
    DistilledSFTLoss,
    logits_divergence,
    top_k_divergence,
)
from verl.algorithms.kl import full_kl
from verl.algorithms.logprob import top_k_from_logits
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.config.schema.algorithm import DistillationLossConfig

STUDENT, TEACHER = [0.5, 0.3, 0.2], [0.25, 0.5, 0.25]


def logs(probabilities):
    return torch.tensor(probabilities).log()


def loss_fn(actor=None, **settings):
    return DistilledPolicyLoss(PPOPolicyLoss(actor or ActorConfig()), DistillationLossConfig(**settings))


def worked():
    """Fixture B with a teacher that finds every sampled token twice as likely as the student does."""
    batch = loss_batch()
    outputs = {"log_probs": batch.pop("log_prob")}
    teacher = poison(outputs["log_probs"].detach() + math.log(2), batch["response_mask"])
    return outputs, {**batch, "old_log_probs": batch.pop("old_log_prob"), "teacher_log_probs": teacher}


def computed(fn, outputs, batch):
    loss, metrics = fn(outputs, batch, loss_norm(batch["response_mask"]))
    return loss, {name: metric.value for name, metric in metrics.items()}


def test_over_the_vocabulary_both_directions_are_the_exact_kl():
    forward = sum(t * math.log(t / s) for s, t in zip(STUDENT, TEACHER))
    reverse = sum(s * math.log(s / t) for s, t in zip(STUDENT, TEACHER))
    assert top_k_divergence(logs(STUDENT), logs(TEACHER), "forward_kl_topk").item() == pytest.approx(forward, abs=1e-6)
    assert top_k_divergence(logs(STUDENT), logs(TEACHER), "reverse_kl_topk").item() == pytest.approx(reverse, abs=1e-5)


def test_the_reverse_direction_counts_other_tokens_as_one():
    student, teacher = logs(STUDENT[:2]), logs(TEACHER[:2])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.3 * math.log(0.3 / 0.5) + 0.2 * math.log(0.2 / 0.25)
    assert top_k_divergence(student, teacher, "reverse_kl_topk").item() == pytest.approx(expected, abs=1e-6)


def test_leaving_the_teachers_tokens_does_not_lower_the_reverse_direction():
    teacher, near, far = logs([0.6, 0.3]), logs([0.6, 0.3]), logs([0.06, 0.03])
    divergences = [top_k_divergence(x, teacher, "reverse_kl_topk").item() for x in (near, far)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6) and divergences[1] > 1.0


def test_the_gradient_over_the_vocabulary_is_that_of_the_exact_kl():
    torch.manual_seed(0)
    logits, of_teacher = torch.randn(5, 11, dtype=torch.float64), torch.randn(5, 11, dtype=torch.float64)
    gradients = []
    for exact in (True, False):
        z = logits.clone().requires_grad_()
        if exact:
            full_kl(z, of_teacher).sum().backward()
        else:
            log_probs, ids = top_k_from_logits(of_teacher, 11)
            top_k_divergence(z.log_softmax(-1).gather(-1, ids), log_probs, "reverse_kl_topk").sum().backward()
        gradients.append(z.grad)
    assert torch.allclose(*gradients, atol=1e-5)


def test_the_most_likely_tokens_come_first_with_their_log_probs():
    log_probs, ids = top_k_from_logits(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    total = math.log(math.exp(0) + math.exp(3) + math.exp(1))
    assert ids.tolist() == [[1, 2]] and log_probs[0].tolist() == pytest.approx([3 - total, 1 - total])


def test_it_joins_the_task_loss_with_its_coefficient():
    outputs, batch = worked()
    task, _ = PPOPolicyLoss(ActorConfig())(outputs, batch, loss_norm(batch["response_mask"]))
    loss, metrics = computed(loss_fn(loss_mode="k1", distillation_loss_coef=0.5), outputs, batch)
    assert loss.item() == pytest.approx(task.item() - 0.5 * math.log(2), abs=1e-6)
    assert metrics["distillation/loss"] == pytest.approx(-math.log(2), abs=1e-6)
    assert metrics["pg_loss"] == pytest.approx(task.item(), abs=1e-6)


@pytest.mark.parametrize(("mode", "each"), [("k2", math.log(2) ** 2 / 2), ("k3", 2 - math.log(2) - 1)])
def test_without_task_rewards_it_stands_alone(mode, each):
    outputs, batch = worked()
    loss, metrics = computed(loss_fn(loss_mode=mode, use_task_rewards=False), outputs, batch)
    assert loss.item() == pytest.approx(each, abs=1e-6) and "pg_loss" not in metrics
    assert (metrics["distillation/loss_min"], metrics["distillation/loss_max"]) == pytest.approx((each, each), abs=1e-6)


def test_a_clamp_bounds_each_token_and_is_counted():
    outputs, batch = worked()
    batch["teacher_log_probs"][0, 0] += 3.0
    loss, metrics = computed(loss_fn(loss_mode="abs", use_task_rewards=False, loss_max_clamp=1.0), outputs, batch)
    tokens = int(batch["response_mask"].sum())
    assert metrics["distillation/clamped_tokens"] == pytest.approx(1 / tokens)
    assert loss.item() == pytest.approx((1.0 + (tokens - 1) * math.log(2)) / tokens, abs=1e-6)


def test_a_floor_of_log_probs_bounds_both_models():
    outputs, batch = worked()
    pairs = [(s, t) for s, t, m in zip(*(x.flatten().tolist() for x in (
        outputs["log_probs"], batch["teacher_log_probs"], batch["response_mask"]))) if m]  # fmt: skip
    floor = sorted(s for s, _ in pairs)[1]
    loss, _ = computed(loss_fn(loss_mode="abs", use_task_rewards=False, log_prob_min_clamp=floor), outputs, batch)
    expected = sum(abs(max(s, floor) - max(t, floor)) for s, t in pairs) / len(pairs)
    assert loss.item() == pytest.approx(expected, abs=1e-6) and expected < math.log(2)


def test_as_a_reward_it_is_a_policy_loss_with_the_negative_divergence():
    outputs, batch = worked()
    settings = {"loss_mode": "k1", "use_task_rewards": False, "use_policy_gradient": True}
    loss, _ = computed(loss_fn(**settings), outputs, batch)
    rewarded = {**batch, "advantages": torch.full_like(batch["advantages"], math.log(2))}
    expected, _ = PPOPolicyLoss(ActorConfig())(outputs, rewarded, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_as_a_reward_it_takes_the_importance_weights_of_the_samples():
    outputs, batch = worked()
    settings = {"loss_mode": "k1", "use_task_rewards": False, "use_policy_gradient": True}
    plain, _ = computed(loss_fn(**settings), outputs, batch)
    weights = torch.full_like(batch["advantages"], 0.1)
    weighted, _ = computed(loss_fn(**settings), outputs, {**batch, "rollout_is_weights": weights})
    assert weighted.item() == pytest.approx(0.1 * plain.item(), abs=1e-7)


def test_a_floor_leaves_the_probability_of_the_tail_as_it_is():
    student, teacher = logs([0.9, 0.01]), logs([0.6, 0.01])
    expected = 0.9 * math.log(0.9 / 0.6) + 0.09 * math.log(0.09 / 0.39)
    divergence = top_k_divergence(student, teacher, "reverse_kl_topk", floor=math.log(0.05))
    assert divergence.item() == pytest.approx(expected, abs=1e-6), "both rare tokens are at the floor, and equal"


def test_junk_outside_the_mask_changes_no_gradient():
    outputs, batch = worked()
    loss, _ = computed(loss_fn(loss_mode="k3"), outputs, batch)
    loss.backward()
    assert torch.isfinite(outputs["log_probs"].grad).all()


def test_several_tokens_per_position_are_read_from_the_batch():
    mask = torch.tensor([[1, 1], [1, 0]])
    student = torch.stack([logs([[0.5, 0.3], [0.2, 0.6]]), torch.full((2, 2), torch.nan)])
    student[1, 0] = logs([0.1, 0.2])
    teacher = logs([[[0.4, 0.4], [0.4, 0.4]], [[0.4, 0.4], [0.4, 0.4]]])
    batch = {"response_mask": mask, "candidate_teacher_log_probs": teacher}
    fn = loss_fn(loss_mode="forward_kl_topk", use_task_rewards=False)
    assert fn.outputs == ("log_probs", "candidate_log_probs")
    outputs = {"log_probs": torch.zeros(2, 2), "candidate_log_probs": student}
    loss, metrics = computed(fn, outputs, batch)
    pairs = [(0.5, 0.3), (0.2, 0.6), (0.1, 0.2)]
    expected = sum(0.4 * math.log(0.4 / p) + 0.4 * math.log(0.4 / q) for p, q in pairs) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["distillation/student_mass"] == pytest.approx((0.8 + 0.8 + 0.3) / 3, abs=1e-6)
    assert metrics["distillation/teacher_mass"] == pytest.approx(0.8, abs=1e-6)


def softmax64(logits, temperature):
    z = np.asarray(logits, dtype=np.float64) / temperature
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def generalised_jsd(s, t, beta):
    """Equation 1 of GKD (arXiv 2306.13649) in float64: P is the teacher, Q the student."""
    m = beta * t + (1 - beta) * s
    return beta * (t * np.log(t / m)).sum(-1) + (1 - beta) * (s * np.log(s / m)).sum(-1)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_the_jsd_of_logits_is_that_of_the_paper(beta, temperature):
    draw = np.random.default_rng(0)
    student, teacher = 3 * draw.standard_normal((2, 6, 40))
    expected = generalised_jsd(softmax64(student, temperature), softmax64(teacher, temperature), beta)
    both = (torch.tensor(x, dtype=torch.float32) for x in (student, teacher))
    computed = logits_divergence(*both, "jsd", beta=beta, temperature=temperature)
    np.testing.assert_allclose(computed.numpy(), expected, atol=1e-6)


def test_the_jsd_tends_to_the_two_kls_at_its_limits():
    draw = np.random.default_rng(1)
    student, teacher = (torch.tensor(x) for x in draw.standard_normal((2, 6, 40)))
    for kind, beta, scale in (("forward_kl", 1e-5, 1e5), ("reverse_kl", 1 - 1e-5, 1e5)):
        limit = scale * logits_divergence(student, teacher, "jsd", beta=beta)
        torch.testing.assert_close(limit, logits_divergence(student, teacher, kind), rtol=1e-3, atol=1e-6)


def test_the_jsd_over_few_tokens_counts_the_others_as_one():
    s, t = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.5, 0.25])
    expected = generalised_jsd(s, t, 0.3)  # the third token is the tail
    computed = top_k_divergence(logs(list(s[:2])), logs(list(t[:2])), "jsd_topk", beta=0.3)
    assert computed.item() == pytest.approx(float(expected), abs=1e-6)


def test_the_gradient_of_the_jsd_is_that_of_finite_differences():
    torch.manual_seed(0)
    z, teacher = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.randn(3, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: logits_divergence(x, teacher, "jsd", beta=0.3, temperature=2.0), z)


def test_on_a_file_the_loss_is_the_weighted_sum_of_both_means():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    outputs = {"log_probs": torch.tensor([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]], requires_grad=True)}
    outputs["full_kl"] = torch.tensor([[0.5, 0.25, 9.0], [0.75, 9.0, 9.0]], requires_grad=True)
    loss, metrics = computed(DistilledSFTLoss(0.25), outputs, {"response_mask": mask})
    assert loss.item() == pytest.approx(0.75 * 2.0 + 0.25 * 0.5)
    assert (metrics["nll"], metrics["distillation/loss"], metrics["num_tokens"]) == pytest.approx((2.0, 0.5, 3.0))
    loss.backward()
    torch.testing.assert_close(outputs["full_kl"].grad, 0.25 / 3 * mask.float())
    torch.testing.assert_close(outputs["log_probs"].grad, -0.75 / 3 * mask.float())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "jsd_topk"])
def test_a_token_that_both_models_exclude_adds_nothing(kind):
    both = [torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)]
    masked = [torch.cat([z, z.new_full((1,), -torch.inf)]).requires_grad_() for z in both]
    value = logits_divergence(*masked, kind, topk=4)
    torch.testing.assert_close(value, logits_divergence(*both, kind, topk=3))
    (gradient,) = torch.autograd.grad(value, masked[0])
    assert gradient.isfinite().all() and gradient[3] == 0
