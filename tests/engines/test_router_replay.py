"""Recorded experts are chosen again: whose weights they get, where they lie in a pass, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.engines.test_families import EXPERTS, LATENT
from tests.harness.engines import gradients, grouped_batch, make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.errors import DataError, EngineError, ModelError
from verl.models.router_replay import NO_RECORD, RouterReplay
from verl.protocol import DataProto

ROUTERS = ("Qwen3MoeTopKRouter", "MixtralTopKRouter", "DeepseekV3TopkRouter")
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {"qwen3_moe": EXPERTS, "mixtral": MIXTRAL, "deepseek_v3": LATENT}
LAYOUTS = {
    "padded": PassSettings(packed=False, router_replay=True),
    "packed": PassSettings(router_replay=True),
    "shared": PassSettings(share_prompts=True, multiple=16, router_replay=True),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: model_dir(folder, family, **config) for family, config in FAMILIES.items()}


def random_experts(batch: DataProto, layers: int, seed: int = 0) -> torch.Tensor:
    """Two different ones of four for each token; the same for the tokens of the same prompt."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(*batch.batch["input_ids"].shape, layers, 4, generator=generator).argsort(-1)[..., :2]
    prompt = batch.batch["prompts"].shape[1]
    for row, tokens in enumerate(batch.batch["prompts"]):
        drawn[row, :prompt] = drawn[int((batch.batch["prompts"] == tokens).all(-1).nonzero()[0]), :prompt]
    return torch.where(batch.batch["attention_mask"].bool()[..., None, None], drawn, NO_RECORD).to(torch.int16)


def with_experts(batch: DataProto, experts: torch.Tensor) -> DataProto:
    return DataProto.from_dict(tensors={**dict(batch.batch.items()), "routed_experts": experts})


class Forced:
    """An independent way to the same: each router's own formula, written out, for experts that are given."""

    def __init__(self, model, family, experts):
        """(B, L, layers, top_k): of rows without padding in front."""
        self.handles = []
        routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        for layer, router in enumerate(routers):
            chosen = experts[:, :, layer].flatten(0, 1).long()
            self.handles.append(router.register_forward_hook(self._hook(family, chosen)))

    def _hook(self, family, chosen):
        def hook(router, inputs, out):
            logits = F.linear(inputs[0].flatten(0, -2), router.weight)
            scores = logits.sigmoid() if family == "deepseek_v3" else logits.softmax(-1)
            weights = torch.stack([scores[i, experts] for i, experts in enumerate(chosen)])
            if family == "mixtral" or router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen

        return hook


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_replays_as_the_routers_formula_written_out(paths, family):
    """One row at a time through a model whose routers have their experts given, against all layouts of a batch."""
    batch, loss_fn = grouped_batch(prompts=2, samples=3), SFTLoss()
    layers = 1 if family == "deepseek_v3" else 2
    batch = with_experts(batch, random_experts(batch, layers))
    tensors = batch.batch
    engine = make_engine(paths[family], passes=PassSettings(packed=False))
    total = tensors["response_mask"].sum()
    engine.model.train()
    loss = 0.0
    for row in range(len(batch)):
        attended = tensors["attention_mask"][row].bool()
        ids, experts = tensors["input_ids"][row, attended][None], tensors["routed_experts"][row, attended][None]
        forced = Forced(engine.model, family, experts)
        log_probs = engine.model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        of_tokens = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
        count = int(tensors["attention_mask"][row, tensors["prompts"].shape[1] :].sum())
        mask = tensors["response_mask"][row, :count]
        part = -(of_tokens[len(of_tokens) - count :] * mask).sum() / total
        part.backward()
        loss += float(part.detach())
        for handle in forced.handles:
            handle.remove()
    expected = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
    routers = [p.grad.norm() for name, p in engine.model.named_parameters() if name.endswith("gate.weight")]
    assert len(routers) == layers and all(norm > 1e-4 for norm in routers)
    for name, passes in LAYOUTS.items():
        ours = make_engine(paths[family], passes=passes)
        assert ours.forward.passes == passes, name
        found, gradient = gradients(ours, batch, loss_fn, max_tokens=70)
        assert found == pytest.approx(loss, rel=1e-5), name
        assert relative_error(gradient, expected) < 1e-5, name


def test_a_router_of_two_experts_that_must_take_the_worse_one_by_hand():
    """Logits 2 and 0, one expert per token: the weight is softmax's share of the forced one."""

    class Router(torch.nn.Module):
        top_k, num_experts = 1, 2

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([[2.0], [0.0]]))

        def forward(self, x):
            logits = F.linear(x, self.weight)
            values, indices = torch.topk(logits.softmax(-1), 1, dim=-1)
            return logits, values, indices

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Router()
            self._can_record_outputs = {"router_logits": type("Recorder", (), {"target_class": Router})}

        def forward(self, x):
            _, weights, chosen = self.gate(x)
            return weights * torch.tensor([3.0, 5.0])[chosen]

    layer = Layer()
    replay = RouterReplay(layer)
    tokens = torch.ones(2, 1)
    with replay.in_passes(), replay.recording():
        layer(tokens)
        assert replay.take().tolist() == [[[0]], [[0]]]
        replay.replay(torch.tensor([[[1]], [[NO_RECORD]]]))
        out = layer(tokens)
        assert replay.take().tolist() == [[[1]], [[0]]]
        out.sum().backward()
    better = 1 / (1 + torch.e**-2)
    worse = 1 - better
    assert out.flatten().tolist() == pytest.approx([5 * worse, 3 * better])
    # d/dz of 5 p1 + 3 p0 with p0 + p1 = 1: the logit of expert 0 gets 3 p0 p1 - 5 p0 p1, that of expert 1 the opposite.
    slope = (3 - 5) * better * worse
    assert layer.gate.weight.grad.flatten().tolist() == pytest.approx([slope, -slope])
    assert replay.differing.metrics().values() == {
        "moe/replay_differs": 1.0
    }  # one recorded choice, and it is not the router's
    assert layer(tokens).flatten().tolist() == pytest.approx([3 * better] * 2)  # afterwards it chooses itself


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaying_what_the_model_itself_chooses_changes_no_bit(paths, layout):
    """R2 with one update per batch: the experts of the pass over old log-probs are those of the update."""
    batch, loss_fn = grouped_batch(prompts=2, samples=3), PPOPolicyLoss(ActorConfig())
    without = make_engine(paths["qwen3_moe"], passes=LAYOUTS[layout])
    made = without.infer(batch, ("log_probs", "routed_experts"), max_tokens=70)
    again = without.infer(with_experts(batch, made["routed_experts"]), ("log_probs", "routed_experts"), max_tokens=70)
    assert all(torch.equal(made[name], again[name]) for name in made)
    plain = gradients(without, batch, loss_fn, max_tokens=70)
    replayed = gradients(without, with_experts(batch, made["routed_experts"]), loss_fn, max_tokens=70)
    assert plain[0] == replayed[0] and torch.equal(plain[1], replayed[1])


def test_what_is_recorded_is_what_was_replayed_and_says_how_much_differs(paths):
    batch = ragged_batch(rows=5)
    experts = random_experts(batch, 2)
    engine = make_engine(paths["qwen3_moe"], passes=LAYOUTS["packed"], model={"enable_gradient_checkpointing": True})
    found = engine.infer(with_experts(batch, experts), ("routed_experts",))["routed_experts"]
    needed = found[..., 0, 0] != NO_RECORD
    assert torch.equal(found[needed], experts[needed]) and bool((needed <= batch.batch["attention_mask"].bool()).all())
    own = engine.infer(batch, ("routed_experts",))["routed_experts"]
    differs = (experts[needed][..., :, None] != own[needed][..., None, :]).all(-1).float().mean()
    values = engine.train_batch(with_experts(batch, found), SFTLoss()).values()
    # Deeper layers see other hidden states than without replay, so the first alone can be compared exactly.
    assert 0.3 < values["moe/replay_differs"] < 0.7
    assert values["moe/replay_differs"] == pytest.approx(float(differs), abs=0.1)


def test_rows_share_a_prompt_only_where_its_experts_are_the_same(paths):
    batch = grouped_batch(prompts=1, samples=3)
    experts = random_experts(batch, 2)
    first = experts[0, : batch.batch["prompts"].shape[1]]
    first.copy_(torch.where(first == NO_RECORD, NO_RECORD, (first + 1) % 4))
    results = {}
    for name, passes in LAYOUTS.items():
        engine = make_engine(paths["qwen3_moe"], passes=passes)
        results[name] = engine.infer(with_experts(batch, experts), ("log_probs",))["log_probs"]
    torch.testing.assert_close(results["shared"], results["padded"], atol=2e-5, rtol=0)


def test_experts_of_another_model_are_refused(paths):
    batch = ragged_batch(rows=2)
    engine = make_engine(paths["qwen3_moe"], passes=LAYOUTS["packed"])
    with pytest.raises(DataError, match=r"routed_experts.*\(rows, tokens, 3, 2\)"):
        engine.infer(with_experts(batch, random_experts(batch, 3)))
    experts = random_experts(batch, 2)
    with pytest.raises(DataError, match="none of this model's"):
        engine.infer(with_experts(batch, torch.where(experts == 3, 4, experts)))


def test_a_dense_model_has_nothing_to_replay(tmp_path):
    with pytest.raises(ModelError, match="no routers"):
        make_engine(model_dir(tmp_path, "qwen2"), passes=LAYOUTS["packed"])
    with pytest.raises(EngineError, match="no such output"):
        make_engine(model_dir(tmp_path, "qwen2")).infer(ragged_batch(rows=2), ("routed_experts",))
