"""How a run is laid out: the roles with their engines and parallel sizes, and the work of one step."""

from __future__ import annotations

from dataclasses import dataclass

ROLLOUT = "rollout"
"""The role of samplers."""


@dataclass(frozen=True)
class Parallel:
    """Parallel sizes of a role, or of its sampling replicas.

    The processes of a role are ``tensor * pipeline * sequence * data``; experts are spread over those of a pipeline
    stage.

    Args:
        tensor: processes that share each matrix (t).
        pipeline: processes that share the depth (p).
        data: shares of a batch (d); of a sampler, its replicas.
        expert: processes that share the experts of a mixture (e).
        sequence: processes that share the sequences, by Ulysses or context parallelism (s).
        expert_tensor: processes that share each matrix of an expert (Megatron); 0: as many as ``tensor``.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    sequence: int = 1
    expert_tensor: int = 0

    @property
    def devices(self) -> int:
        """Processes of the role."""
        return self.pipeline * self.stage

    @property
    def stage(self) -> int:
        """Processes of a pipeline stage."""
        return self.tensor * self.sequence * self.data

    @property
    def expert_shards(self) -> int:
        """Processes that share one copy of a stage's experts; Megatron needs a divisor of `stage`."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def model(self) -> int:
        """Processes that share one copy of the dense matrices."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class RolePlan:
    """One model of a run on its devices.

    Args:
        role: ``actor``, ``rollout``, ``ref``, ``critic``, ``rm``, or the name of an added one.
        engine: a row of `engines.TRAINERS` or `engines.SAMPLERS`.
        devices: processes of the role, one per device; equals ``parallel.devices``.
        parallel: how they share the work.
        pool: roles of one pool take turns on the same devices.
        trains: it has gradients and an optimizer.
        infers: a step has a pass of it without gradients.
        shares_prompts: a prompt is computed once for all its samples in a micro-batch (``use_prefix_grouper``).
        weight_bytes: per weight that the optimizer updates or a frozen role holds (4: float32).
        compute_bytes: per value in matrix products and activations (2: bf16).
        shards: devices over which fsdp2 spreads one copy of the weights.
        keeps_gathered: gathered weights stay until the backward pass (``reshard_after_forward=false``).
        optimizer: its name, a row of `engines.OPTIMIZERS`.
        optimizer_offload: its state is on the host between updates.
        param_offload: weights are on the host between updates, too.
        offload_policy: weights, gradients and optimizer are on the host during updates, too (fsdp2).
        recompute: activations of a layer are computed again in the backward pass.
        compiled: layers are compiled, and keep less.
        on_cpu: the device is a CPU.
        full_gradients: processes sum their gradients at the last micro-batch, and each has all of them until then.
        activation_offload: what recomputation keeps of a layer is on the host until the backward pass.
        micro_tokens: tokens of a micro-batch of an update, per device.
        infer_tokens: tokens of a micro-batch of a pass without gradients, per device.
        mini_batches: optimizer steps per pass over the batch.
        epochs: passes of an update over the batch.
        fused_head: log-probs come without logits of all tokens: ``""``, ``torch`` or ``triton``.
        entropy: the loss reads the entropy.
        infer_entropy: a pass without gradients computes it.
        scalar_head: the model gives one number per token (critic, reward model).
        lora_rank: of an adapter on all linear layers (one on fewer takes less); 0 trains all weights.
        freeze_vision: the vision tower is not trained.
        async_save: a checkpoint is copied to the host, and written while training continues.
        memory_fraction: of a sampler, the share of a device's memory that it takes (``gpu_memory_utilization``).
        cache_bytes: per value of the KV cache.
        batch_rows: of a sampler, sequences in work per replica at most (``max_num_seqs``).
        sleeps: a sampler gives its memory back while others work.
        bucket_bytes: largest chunk of a weight sync.
    """

    role: str
    engine: str
    devices: int = 1
    parallel: Parallel = Parallel()
    pool: str = "global_pool"
    trains: bool = False
    infers: bool = True
    shares_prompts: bool = False
    weight_bytes: int = 4
    compute_bytes: int = 2
    shards: int = 1
    keeps_gathered: bool = False
    optimizer: str = "AdamW"
    optimizer_offload: bool = False
    param_offload: bool = False
    offload_policy: bool = False
    recompute: bool = False
    compiled: bool = False
    on_cpu: bool = False
    full_gradients: bool = False
    activation_offload: bool = False
    micro_tokens: int = 0
    infer_tokens: int = 0
    mini_batches: int = 1
    epochs: int = 1
    fused_head: str = ""
    entropy: bool = False
    infer_entropy: bool = False
    scalar_head: bool = False
    lora_rank: int = 0
    freeze_vision: bool = False
    async_save: bool = False
    memory_fraction: float = 0.0
    cache_bytes: int = 2
    batch_rows: int = 1024
    sleeps: bool = True
    bucket_bytes: int = 2 << 30

    @property
    def trained_bytes(self) -> int:
        """Per weight that is trained: an adapter is float32, also over a base of 16 bits."""
        return max(4, self.weight_bytes) if self.lora_rank else self.weight_bytes

    @property
    def samples(self) -> bool:
        """Whether the role is a sampler."""
        return self.role == ROLLOUT


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts or responses.

    Args:
        mean: of all sequences.
        longest: the most that the settings admit.
    """

    mean: float
    longest: int


@dataclass(frozen=True)
class Workload:
    """What one step of the run does.

    Args:
        prompts: per step.
        samples: per prompt.
        prompt, response: lengths in tokens.
        steps: of the run; None: unknown.
    """

    prompts: int
    samples: int
    prompt: Lengths
    response: Lengths
    steps: int | None = None

    @property
    def sequences(self) -> int:
        """Per step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt.longest + self.response.longest

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence in the mean."""
        return self.prompt.mean + self.response.mean

    @property
    def tokens(self) -> float:
        """Tokens of all sequences of a step."""
        return self.sequences * self.mean_length


def computed_prompts(plan: RolePlan, work: Workload, budget: int, mini_batches: int) -> float:
    """Share of the prompts of all sequences that a trainer computes: each once for its samples in a micro-batch.

    Args:
        budget: tokens of a micro-batch per device; 0: those of one device are in one.
        mini_batches: into which the batch is divided first; 1 for a pass without gradients.
    """
    if not plan.shares_prompts:
        return 1.0
    rows = min(work.samples, work.sequences // (plan.parallel.data * mini_batches))
    if budget:
        rows = min(rows, int((budget * plan.parallel.sequence - work.prompt.mean) // work.response.mean))
    return -(-work.samples // max(1, rows)) / work.samples
