"""The plain engine against independent forward passes, optimizers and losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.harness.engines import (
    FAMILIES,
    gradients,
    make_engine,
    model_dir,
    padded_logits,
    policy_loss,
    ragged_batch,
    relative_error,
)
from verl.algorithms.aggregation import agg_loss
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss, SFTLoss
from verl.config import ActorConfig, CriticConfig
from verl.engines.rows import AlignedRows
from verl.errors import ConfigError, DataError, EngineError
from verl.metrics import notices
from verl.protocol import DataProto
from verl.trainer.ppo.sample_rows import as_sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_padded_forward_pass_of_transformers(tmp_path, family):
    path = model_dir(tmp_path, family)
    batch = ragged_batch()
    found = make_engine(path, trains=False).infer(batch, ("log_probs", "entropy", "sum_pi_squared"), temperature=0.7)
    with torch.no_grad():
        logits = padded_logits(AutoModelForCausalLM.from_pretrained(path).eval(), batch) / 0.7
    mask = batch.batch["response_mask"].bool()
    every = logits.log_softmax(-1)
    log_probs = every.gather(-1, batch.batch["responses"][..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    assert found["log_probs"].dtype == torch.float32
    torch.testing.assert_close(found["log_probs"], log_probs.where(mask, torch.tensor(0.0)), atol=1e-5, rtol=1e-5)
    squared = every.exp().square().sum(-1).where(mask, torch.tensor(0.0))
    torch.testing.assert_close(found["sum_pi_squared"], squared, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found["entropy"], entropy.where(mask, torch.tensor(0.0)), atol=1e-5, rtol=1e-5)


def test_log_probs_of_a_pretrained_model_equal_transformers(shared):
    path = shared / "models" / "tinystories-260k"
    batch = ragged_batch(rows=8, prompt=20, response=30, vocab=512)
    found = make_engine(path, trains=False).infer(batch)["log_probs"]
    with torch.no_grad():
        logits = padded_logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), batch)
    expected = logits.log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]
    mask = batch.batch["response_mask"].bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=1e-5)


def test_value_at_t_is_that_of_the_state_before_token_t(qwen2):
    engine = make_engine(qwen2, kind="value", trains=False, seed=3)
    torch.manual_seed(0)
    torch.nn.init.normal_(engine.model.score.weight)
    torch.nn.init.normal_(engine.model.score.bias)
    batch = ragged_batch()
    with torch.no_grad():
        expected = padded_logits(engine.model, batch)[..., 0]  # the head at position P + t - 1
    mask = batch.batch["response_mask"].bool()
    found = engine.infer(batch, ("values",))["values"]
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)
    assert (found[~mask] == 0).all() and found[mask].abs().min() > 0


def test_attention_runs_without_a_mask(qwen2, monkeypatch):
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def record(*args, **kwargs):
        seen.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    make_engine(qwen2, trains=False).infer(ragged_batch())
    assert seen and all(mask is None and causal is True for mask, causal in seen)


class MeanOfSequences:
    """A user's loss that looks at no column for shares: 1 for every token."""

    outputs = ("log_probs",)

    def __call__(self, outputs, batch, norm):
        ones = outputs["log_probs"] * 0 + 1
        return agg_loss(ones, batch["response_mask"], "seq-mean-token-mean", norm), {}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_loss_counts_a_sample_of_several_rows_once(qwen2, size):
    batch = ragged_batch(rows=4)
    assert batch.batch["response_mask"].any(-1).sum() == 3, "one row is trained on nowhere"
    as_sequences(batch, range(4), np.array([0, 0, 0, 0]))
    loss, _ = gradients(make_engine(qwen2), batch, MeanOfSequences(), micro_batch_size=size)
    assert loss == pytest.approx(1.0, abs=1e-6), "over three rows it is 3 where rows count"


def test_the_head_sees_only_positions_that_predict_a_trained_token(qwen2):
    engine = make_engine(qwen2, trains=False)
    rows = []
    engine.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[-2]))
    batch = ragged_batch()
    engine.infer(batch, micro_batch_size=2)
    assert sum(rows) == int(batch.batch["response_mask"].sum())


@pytest.mark.parametrize("family", ("qwen2", "gemma2"))
def test_one_step_equals_a_reference_written_out(tmp_path, family):
    """Clipped policy loss, global token mean, clipping by norm and AdamW, all in one padded pass."""
    path = model_dir(tmp_path, family)
    batch = ragged_batch(rows=6, seed=1)
    engine = make_engine(path, optim={"lr": 1e-3, "weight_decay": 0.1}, grad_clip=0.05)
    metrics = engine.train_batch(batch, policy_loss(), temperature=0.9, micro_batch_size=2).values()

    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    mask = batch.batch["response_mask"].bool()
    every = (padded_logits(model, batch) / 0.9).log_softmax(-1)
    log_prob = every.gather(-1, batch.batch["responses"][..., None])[..., 0][mask]
    old, advantage = batch.batch["old_log_probs"][mask], batch.batch["advantages"][mask]
    ratio = (log_prob - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantage < 0, torch.minimum(-3.0 * advantage, clipped), clipped).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()

    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4) and norm > 0.05
    for (name, found), expected in zip(engine.model.named_parameters(), model.parameters()):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=name)


def test_training_a_value_model_moves_values_towards_the_returns(qwen2):
    engine = make_engine(qwen2, kind="value", optim={"lr": 3e-2, "weight_decay": 0.0}, seed=1)
    batch = ragged_batch()
    mask = batch.batch["response_mask"].bool()
    errors = []
    for _ in range(25):
        batch.batch["values"] = engine.infer(batch, ("values",))["values"]
        metrics = engine.train_batch(batch, PPOValueLoss(CriticConfig()))
        errors.append((batch.batch["values"] - batch.batch["returns"])[mask].square().mean().item())
    assert metrics.values()["vf_loss"] < errors[0] / 2
    assert errors[-1] < 0.5 * errors[0]


def test_supervised_loss_works_on_rows_without_a_prompt_part(qwen2):
    """The form of the supervised trainer: responses are the row without its first token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 259, (4, 9), generator=generator)
    loss_mask = torch.ones(4, 9, dtype=torch.long)
    loss_mask[:, :3] = 0
    attention = torch.ones(4, 9, dtype=torch.long)
    attention[0, 6:] = 0
    loss_mask[0, 6:] = 0
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "responses": ids[:, 1:],
            "response_mask": loss_mask[:, 1:],
        }
    )
    engine = make_engine(qwen2)
    loss = engine.train_batch(batch, SFTLoss()).values()["loss"]
    labels = ids.masked_fill(loss_mask == 0, -100)
    model = AutoModelForCausalLM.from_pretrained(qwen2)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(qwen2):
    engine = make_engine(qwen2)
    batch = ragged_batch()
    engine.train_batch(batch, policy_loss())
    before = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    broken = ragged_batch()
    row, t = broken.batch["response_mask"].nonzero()[0]
    broken.batch["advantages"][row, t] = torch.inf
    metrics = engine.train_batch(broken, policy_loss()).values()
    assert metrics["skipped_nonfinite_step"] == 1
    after = engine.state().tensors
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert engine.train_batch(batch, policy_loss()).values()["skipped_nonfinite_step"] == 0


def test_a_mini_batch_without_a_valid_token_is_skipped(qwen2):
    engine = make_engine(qwen2)
    batch = ragged_batch()
    engine.train_batch(batch, policy_loss())
    before = [p.clone() for p in engine.model.parameters()]
    batch.batch["response_mask"].zero_()
    metrics = engine.train_batch(batch, policy_loss()).values()
    assert metrics["skipped_empty_step"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
    assert (engine.infer(batch)["log_probs"] == 0).all()


def test_learning_rate_follows_the_schedule_once_per_global_step(qwen2):
    settings = {"lr": 1.0, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine"}
    engine = make_engine(qwen2, optim=settings, total_training_steps=10)
    rates = []
    for _ in range(7):
        rates.append(engine.train_batch(ragged_batch(), policy_loss(), micro_batch_size=3).values()["lr"])
        engine.step_scheduler()
    assert rates[:3] == [0.0, 0.5, 1.0] and rates[6] == pytest.approx(0.5)


def test_bf16_computes_in_bf16_and_keeps_float32_weights(qwen2):
    batch = ragged_batch()
    exact = make_engine(qwen2).infer(batch)["log_probs"]
    engine = make_engine(qwen2, engine={"dtype": "bfloat16"})
    found = engine.infer(batch)["log_probs"]
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.05
    before = engine.model.lm_head.weight.clone()
    engine.train_batch(batch, policy_loss())
    assert engine.model.lm_head.weight.dtype == torch.float32
    assert not torch.equal(before, engine.model.lm_head.weight)


def test_gradient_checkpointing_changes_no_gradient(qwen2):
    batch = ragged_batch()
    plain = make_engine(qwen2, model={"enable_gradient_checkpointing": False})
    recomputed = make_engine(qwen2, model={"enable_gradient_checkpointing": True})
    assert recomputed.model.model.layers[0].gradient_checkpointing
    assert not plain.model.model.layers[0].gradient_checkpointing
    (_, expected), (_, found) = (gradients(e, batch, policy_loss()) for e in (plain, recomputed))
    assert relative_error(found, expected) < 1e-6


def test_dropout_is_on_in_training_and_off_in_inference(tmp_path):
    path = model_dir(tmp_path, "qwen2", attention_dropout=0.5)
    engine = make_engine(path)
    batch = ragged_batch()
    assert torch.equal(engine.infer(batch)["log_probs"], engine.infer(batch)["log_probs"])
    engine.optimizer.param_groups[0]["lr"] = 0.0
    losses = {engine.train_batch(batch, policy_loss()).values()["loss"] for _ in range(3)}
    assert len(losses) == 3


def test_a_saved_folder_loads_with_from_pretrained_and_gives_the_same_log_probs(qwen2, tmp_path):
    from transformers import AutoTokenizer

    engine = make_engine(qwen2)
    engine.train_batch(ragged_batch(), policy_loss())
    engine.save_hf(tmp_path / "out", AutoTokenizer.from_pretrained(qwen2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, tensor in engine.export_weights():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    expected = engine.infer(ragged_batch())["log_probs"]
    assert torch.equal(make_engine(tmp_path / "out").infer(ragged_batch())["log_probs"], expected)


def test_a_saved_value_model_loads_as_a_token_classifier(qwen2, tmp_path):
    engine = make_engine(qwen2, kind="value")
    engine.train_batch(ragged_batch(), PPOValueLoss(CriticConfig()))
    engine.save_hf(tmp_path / "critic")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").config.num_labels == 1
    expected = engine.infer(ragged_batch(), ("values",))["values"]
    again = make_engine(tmp_path / "critic", kind="value", seed=99)
    assert torch.equal(again.infer(ragged_batch(), ("values",))["values"], expected)


def test_export_names_tied_embeddings_once(tmp_path):
    engine = make_engine(model_dir(tmp_path, "qwen2", tie_word_embeddings=True))
    names = [name for name, _ in engine.export_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert engine.num_parameters == sum(tensor.numel() for _, tensor in engine.export_weights())


@pytest.mark.parametrize(("rows", "tokens"), [(0, 7), (6, 0)])
def test_a_batch_without_rows_or_without_response_tokens_gives_empty_results(qwen2, rows, tokens):
    batch = ragged_batch()[:rows]
    for name in ("responses", "response_mask"):
        batch.batch[name] = batch.batch[name][:, :tokens]
    assert make_engine(qwen2, trains=False).infer(batch)["log_probs"].shape == (rows, tokens)
    assert make_engine(qwen2).train_batch(batch, SFTLoss()).values()["skipped_empty_step"] == 1


@pytest.mark.parametrize(
    ("outputs", "error"), [(("values",), EngineError), (("logits",), EngineError), (("log_probs", "x"), EngineError)]
)
def test_an_output_that_the_model_does_not_have_is_refused(qwen2, outputs, error):
    with pytest.raises(error, match=r"no such output"):
        make_engine(qwen2, trains=False).infer(ragged_batch(), outputs)


def test_a_frozen_engine_does_not_train(qwen2):
    with pytest.raises(EngineError, match=r"frozen"):
        make_engine(qwen2, trains=False).train_batch(ragged_batch(), policy_loss())


def test_a_temperature_of_zero_is_refused(qwen2):
    with pytest.raises(ConfigError, match=r"positive temperature"):
        make_engine(qwen2, trains=False).infer(ragged_batch(), temperature=0.0)


def test_trained_weights_in_float16_are_refused_by_name(qwen2):
    with pytest.raises(ConfigError, match=r"model_dtype: weights .* dtype=float16"):
        make_engine(qwen2, engine={"model_dtype": "fp16"})
    make_engine(qwen2, engine={"model_dtype": "fp16"}, trains=False)


def test_a_row_whose_first_token_is_trained_on_is_an_error_that_names_it(qwen2):
    batch = ragged_batch()
    batch.batch["attention_mask"][2, :5] = 0
    batch.batch["response_mask"][2, 0] = 1
    del batch.batch["position_ids"]
    with pytest.raises(DataError, match=r"row 2"):
        AlignedRows.of(batch)


def test_positions_that_do_not_count_the_tokens_are_an_error(qwen2):
    batch = ragged_batch()
    batch.batch["position_ids"] = batch.batch["position_ids"] + 3
    with pytest.raises(DataError, match=r"row 0"):
        AlignedRows.of(batch)


@pytest.mark.parametrize("name", ["param_offload", "optimizer_offload"])
def test_what_is_in_host_memory_stays_there_and_a_notice_says_so(qwen2, name):
    engine = make_engine(qwen2, engine={name: True})
    engine.train_batch(ragged_batch(), PPOPolicyLoss(ActorConfig()))
    engine.step_scheduler()
    assert [text for key, text in notices().items() if name in key] == [
        "has no effect on a CPU: host memory is where everything is"
    ]
