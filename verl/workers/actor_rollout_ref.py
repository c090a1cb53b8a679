"""Policy, sampler and reference policy on one worker, in any combination."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from verl import distributed
from verl.agent_loop import AgentLoopManager
from verl.algorithms.losses import PPOPolicyLoss
from verl.checkpoint import FileRecord
from verl.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    DataConfig,
    HFModelConfig,
    OptimizerConfig,
    PPOTrainerConfig,
    ProfilerConfig,
    RefConfig,
    replace,
)
from verl.data import tokenizer_of
from verl.engines.base import Engine
from verl.errors import WorkerError
from verl.metrics import Metric, MetricSet
from verl.models.lora import LoraSettings
from verl.protocol import DataProto
from verl.rollout.adapters import sent_alone
from verl.rollout.base import Sampler
from verl.rollout.group import Sharing, Together
from verl.rollout.place import make_sampler
from verl.single_controller.base import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.weight_sync import chunk_weights
from verl.workers.background import InBackground
from verl.workers.part import (
    Limits,
    ModelPart,
    Site,
    base_of,
    layout,
    local_model,
    make_engine,
    memory_of,
    meshes_of,
    schedule_steps,
    seat_of,
)
from verl.workers.profiling import ProfiledWorker, profiled
from verl.workers.scoring import early_scorer
from verl.workers.training import load_part, save_part, saved_records

ROLES = {
    "actor": {"actor"},
    "rollout": {"rollout"},
    "ref": {"ref"},
    "actor_rollout": {"actor", "rollout"},
    "actor_rollout_ref": {"actor", "rollout", "ref"},
}
BYTES_SENT = "weight_bytes_sent"
"""What a sampler counts that weights reach by a transport; others see the tensors themselves."""
LOG_PROB_OUTPUTS = {"old_log_probs": "log_probs", "entropys": "entropy", "sum_pi_squared": "sum_pi_squared",
                    "ref_kl": "full_kl"}  # fmt: skip
"""Columns of a batch that `compute_log_prob` makes, and what the engine calls them."""


class ActorRolloutRefWorker(ProfiledWorker):
    """One worker of the policy.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        role: which of the three it plays: actor, rollout, ref, actor_rollout, actor_rollout_ref.
        site: device, training backend, seed and length of the run.
        data: the section ``data``, for agent loops that render messages.
        scoring: the whole configuration, where samples are scored beside sampling; None: after it, by the controller.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str = "actor_rollout_ref",
        site: Site | None = None,
        data: DataConfig | None = None,
        scoring: PPOTrainerConfig | None = None,
    ):
        super().__init__()
        if role not in ROLES:
            raise WorkerError("unknown worker role", got=role, allowed=sorted(ROLES))
        self.config, self.site, self.plays, self.data = config, site or Site(), ROLES[role], data
        self.scoring = scoring
        self.tokenizer: Any = None
        self.hand_over = InBackground("verl-weights")
        self.bytes_sent = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model once per role that trains or scores, and start the sampler."""
        self.model = model = local_model(self.config.model, "actor_rollout_ref.model.path")
        self.tokenizer = tokenizer_of(model)
        rollout, site = self.config.rollout, self.site
        sharing = None
        if "rollout" in self.plays:
            sharing = Sharing.of(rollout, model, site.device, self.world_size)
        if "actor" in self.plays:
            self.actor = self._make_actor()
        if "ref" in self.plays:
            self.ref = self._make_ref()
        if {"actor", "ref"} <= self.plays:
            self.actor.engine.compare_with(self.ref.engine)
        if "rollout" in self.plays:
            self._make_rollout(sharing)

    def profiler_configs(self) -> dict[str, ProfilerConfig]:
        c = self.config
        sections = {"actor": c.actor.profiler, "rollout": c.rollout.profiler, "ref": c.ref.profiler}
        return {role: section for role, section in sections.items() if role in self.plays}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @profiled("rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run the agent loop of every row: responses, masks and the sampler's own log-probs.

        Workers that hold a sampler together get the same rows; one of them is heard.
        """
        self.hand_over.wait()
        with memory_of("generate", self.site.device) as memory:
            asyncio.run(self.sampler.wake())
            try:
                made = self._sampled(prompts)
            finally:
                if self._frees_cache():
                    asyncio.run(self.sampler.sleep(level=1))
        sent = {"perf/weights_sent_mb": Metric(self.bytes_sent / 1e6, "max")}
        made.meta_info["metrics"] = {**made.meta_info.get("metrics", {}), **memory, **sent}
        return made

    def meshes(self) -> dict[str, tuple[int, bool]]:
        parts = {name: getattr(self, name, None) for name in ("actor", "ref")}
        return {**meshes_of(self, **parts), **super().meshes()}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @profiled("actor")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` (B, T), and what else of `LOG_PROB_OUTPUTS` ``meta_info["outputs"]`` names."""
        self.hand_over.wait()
        wanted = data.meta_info.get("outputs") or ["old_log_probs"]
        columns = {name: LOG_PROB_OUTPUTS[name] for name in LOG_PROB_OUTPUTS if name in {"old_log_probs", *wanted}}
        found = self.actor.infer(data, tuple(columns.values()))
        return DataProto.from_dict(tensors={name: found[output] for name, output in columns.items()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    @profiled("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, T) of the reference policy."""
        self.hand_over.wait()  # beside a LoRA actor the reference is the actor's own model
        return DataProto.from_dict(tensors={"ref_log_prob": self.ref.infer(data, ("log_probs",))["log_probs"]})

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="actor"))
    @profiled("actor")
    def update_actor(self, data: DataProto) -> MetricSet:
        """One optimizer step per mini-batch of ``data``, which holds ``advantages``."""
        self.hand_over.wait()
        return self.actor.train(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, global_steps: int) -> None:
        """Hand the actor's weights to the sampler as version ``global_steps``."""
        self.hand_over.wait()
        self._hand_over_weights(global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_weight_update(self, global_steps: int) -> None:
        """As `update_weights`, while the caller goes on; whatever needs the policy or the sampler waits for its end.

        Alone, this worker does it in a thread, so that other roles in its process go on, too. One of several does it
        in this call: its collectives must not meet those of another role.
        """
        self.hand_over.wait()
        if self.world_size == 1:
            self.hand_over.begin(lambda: self._hand_over_weights(global_steps))
        else:
            self._hand_over_weights(global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_weight_update(self) -> None:
        """Wait for what `begin_weight_update` began; what went wrong with it is raised here."""
        self.hand_over.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, contents: tuple[str, ...] = ("model", "optimizer", "extra"), background: bool = False
    ) -> dict:
        """Write the actor's state and its Hugging Face folder into ``local_path`` (see `TrainingWorker`)."""
        self.hand_over.wait()
        return save_part(self.actor, local_path, contents, self.tokenizer, background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_records(self, wait: bool = False) -> Mapping[str, FileRecord] | None:
        """The records of a save in the background, or None while it is being written."""
        return saved_records(self.actor, wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, contents: tuple[str, ...] = ("model", "optimizer", "extra")) -> None:
        """Continue from what `save_checkpoint` wrote; the sampler gets the weights at the next `update_weights`."""
        self.hand_over.wait()
        load_part(self.actor, local_path, contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_reference(self) -> None:
        """The reference policy becomes the actor as it is now."""
        self.hand_over.wait()
        self.ref.engine.copy_weights(self.actor.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, local_path: str) -> dict:
        """Write the reference policy's weights and its Hugging Face folder into ``local_path``."""
        return save_part(self.ref, local_path, ("model",), self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, local_path: str) -> None:
        """Continue with the reference policy that `save_reference` wrote."""
        load_part(self.ref, local_path, ("model",))

    def _hand_over_weights(self, version: int) -> None:
        bucket_bytes = self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        chunks = chunk_weights(self._counted(self._sent()), bucket_bytes, version=version)
        before = self.sampler.stats().get(BYTES_SENT, 0)
        asyncio.run(self.sampler.update_weights(chunks, version))
        self.bytes_sent = self.sampler.stats().get(BYTES_SENT, before + self.bytes_sent) - before

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        engine = self.actor.engine
        if self.together is not None:
            return self.together.weights(engine)
        alone = sent_alone(self.config.rollout, self.model)
        return engine.export_weights() if alone is None else engine.export_adapter()

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.bytes_sent = 0.0
        for name, tensor in weights:
            self.bytes_sent += tensor.nbytes
            yield name, tensor
            del tensor  # before the next one is made

    def _sampled(self, prompts: DataProto) -> DataProto:
        if self.together is None:
            return self.agent_loops.generate_sequences(prompts)
        if not self.together.sampler.leads:
            self.together.sampler.follow()
            return prompts[:0]
        try:
            return self.agent_loops.generate_sequences(prompts)
        finally:
            self.together.sampler.end_turn()

    def _frees_cache(self) -> bool:
        """Whether the sampler gives its cache back to the trainer between rollouts."""
        asked = self.config.rollout.free_cache_engine
        return self.site.device != "cpu" if asked is None else asked

    def _make_actor(self) -> ModelPart:
        c, rollout = self.config.actor, self.config.rollout
        engine = self._engine(c, self.site.strategy, optim=c.optim)
        ranks = seat_of(self, engine).size
        return ModelPart(
            engine,
            train_limits=Limits.of(
                c.ppo_micro_batch_size_per_gpu,
                c.ppo_micro_batch_size,
                c.use_dynamic_bsz,
                c.ppo_max_token_len_per_gpu,
                ranks,
            ),
            infer_limits=Limits.of(
                rollout.log_prob_micro_batch_size_per_gpu,
                rollout.log_prob_micro_batch_size,
                rollout.log_prob_use_dynamic_bsz,
                rollout.log_prob_max_token_len_per_gpu,
                ranks,
            ),
            loss_fn=PPOPolicyLoss(c, response_length=rollout.response_length),
            temperature=rollout.temperature,
            mini_batch_rows=max(1, c.ppo_mini_batch_size * c.rollout_n // ranks),
        )

    def _make_ref(self) -> ModelPart:
        c, engine = self.config.ref, self._ref_engine()
        return ModelPart(
            engine,
            infer_limits=Limits.of(
                c.log_prob_micro_batch_size_per_gpu,
                c.log_prob_micro_batch_size,
                c.log_prob_use_dynamic_bsz,
                c.log_prob_max_token_len_per_gpu,
                seat_of(self, engine).size,
            ),
            temperature=self.config.rollout.temperature,
        )

    def _ref_engine(self) -> Any:
        """The reference is the model without its adapter: beside a LoRA actor it needs no weights of its own."""
        if LoraSettings.of(self.model) is not None and "actor" in self.plays:
            return base_of(self.actor.engine)
        strategy = self.site.ref_strategy or self.site.strategy
        base = replace(self.model, lora_rank=0, lora_adapter_path=None)
        return self._engine(self.config.ref, strategy, model=base)

    def _engine(
        self,
        role: ActorConfig | RefConfig,
        strategy: str,
        optim: OptimizerConfig | None = None,
        model: HFModelConfig | None = None,
    ) -> Engine:
        return make_engine(
            strategy,
            self.info,
            self.config.nccl_timeout,
            model=model or self.model,
            optim=optim,
            kind="causal_lm",
            grad_clip=self.config.actor.grad_clip,
            total_training_steps=schedule_steps(optim, self.site) if optim else self.site.total_training_steps,
            device=self.site.device,
            seed=self.site.seed,
            **layout(strategy, self.model, role.fsdp_config, role.megatron, self.config.actor.use_prefix_grouper),
        )

    def _make_rollout(self, sharing: Sharing | None) -> None:
        rollout, name = self.config.rollout, f"sampler of {self.info.role}[{self.rank}]"
        self.together: Together | None = None
        if sharing is None:
            self.sampler: Sampler = make_sampler(rollout, self.model, self.site.device, name)
            self.set_dispatch_collect("rollout", self.rank, True)
        else:
            ranks = distributed.start(self.info, self.site.device, self.config.nccl_timeout)
            self.together = sharing.on(ranks, self.actor.engine if "actor" in self.plays else None)
            self.sampler = self.together.sampler
            self.set_dispatch_collect("rollout", self.together.replica, self.together.sampler.leads)
        early = None if self.scoring is None else early_scorer(self.scoring, self.tokenizer, self.world_size)
        self.agent_loops = AgentLoopManager(
            rollout,
            self.sampler,
            self.tokenizer,
            data_config=self.data,
            score_row=None if early is None else early.score,
        )
