"""Declared fields: what each column of a batch is, who makes it, and how it is padded.

A batch is a dictionary, so nothing else says that ``responses`` are padded on the right or that ``values`` come from
the critic. The declaration does: `DataProto.concat` pads batches of different widths by it, and a missing column is
reported together with the stage that should have made it. A recipe declares its own columns with `declare_field`.

Symbols in a shape: ``B`` rows, ``P`` prompt width (padded left), ``T`` response width (padded right), ``P+T`` both, one
after the other; any other name is a fixed size. Where several forms are allowed (position ids of vision models have a
plane axis), further axes stand between ``B`` and the time axis, which is counted from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from verl.errors import BatchError, ConfigError, suggest

CANDIDATES = "candidate_ids"
"""(B, T, K) int32: tokens of which a model gives the log-probs at each position, besides the sampled one."""
TURN_STATES = "turn_states"
"""(B,) lists: (place in the response where an action begins, state of the environment) of every action, in order."""
BEFORE, TRAJECTORY_NUMBER, SHARES = "trajectories_before", "trajectory_number", "sequence_shares"
"""Columns of samples with several trajectories: the earlier ones; the number of a row in its sample; its share."""
TIME_SYMBOLS = ("P", "T", "P+T")
PaddingRule = Literal["pad_token", "edge"]
PaddingValue = float | bool | PaddingRule
PAD_TOKEN_KEY = "pad_token_id"
"""The key of ``meta_info`` that holds the tokenizer's padding token; without it token columns are padded with 0."""


@dataclass(frozen=True)
class Field:
    """One column.

    ``dtype`` is a torch dtype, or ``object`` for a non-tensor column. ``padding_value`` is a number, ``"pad_token"``
    (``meta_info["pad_token_id"]``) or ``"edge"`` (the outermost value continues, as position ids do).

    Example:
        >>> declare_field("turn_ids", torch.int32, ("B", "T"), "my_recipe.collect", padding_value=-1)
    """

    name: str
    dtype: torch.dtype | type
    shape: tuple[str, ...]
    producer: str
    padding_value: PaddingValue = 0
    doc: str = ""

    @cached_property
    def time_axis(self) -> int | None:
        """The padded axis as a negative index, or None for a column that has no time."""
        for axis, symbol in enumerate(self.shape):
            if symbol in TIME_SYMBOLS:
                return axis - len(self.shape)
        return None

    @cached_property
    def time_symbol(self) -> str | None:
        axis = self.time_axis
        return None if axis is None else self.shape[axis]


_FIELDS: dict[str, Field] = {}


def declare_field(
    name: str,
    dtype: torch.dtype | type = object,
    shape: tuple[str, ...] = ("B",),
    producer: str = "",
    padding_value: PaddingValue = 0,
    doc: str = "",
) -> Field:
    """Declare a column; the same declaration may be repeated, a different one under a used name is an error."""
    field = Field(name, dtype, tuple(shape), producer, padding_value, doc)
    if field.shape[:1] != ("B",) or sum(symbol in TIME_SYMBOLS for symbol in field.shape) > 1:
        raise ConfigError(f"the shape of field {name!r} must start with B and have at most one time axis", got=shape)
    prior = _FIELDS.setdefault(name, field)
    if prior != field:
        raise ConfigError(f"the field {name!r} is declared already, by {prior.producer or 'another module'}", got=field)
    return prior


def declared_field(name: str) -> Field | None:
    return _FIELDS.get(name)


def missing_key_error(key: str, present: list[str], where: str = "the batch") -> BatchError:
    """The error for a missing column."""
    field = _FIELDS.get(key)
    fix = suggest(key, present)
    if field is not None and field.producer and not fix:
        fix = f"It is made by: {field.producer}."
    return BatchError(f"{where} has no {key!r}", allowed=present or "nothing, it is empty", fix=fix)


def _declare_standard_fields() -> None:
    rollout = "generate (agent loop and sampler)"
    token, float32 = torch.int64, torch.float32
    row, prompt, response, sequence = ("B",), ("B", "P"), ("B", "T"), ("B", "P+T")
    for field in (
        Field("prompts", token, prompt, rollout, "pad_token", "prompt tokens, padded left"),
        Field("responses", token, response, rollout, "pad_token", "sampled and tool tokens, padded right"),
        Field("input_ids", token, sequence, rollout, "pad_token", "prompts and responses side by side"),
        Field("attention_mask", token, sequence, rollout, 0, "1 on every token that is not padding"),
        Field("position_ids", token, sequence, rollout, "edge", "positions; (B, axes, P+T) for vision models"),
        Field("response_mask", token, response, rollout, 0, "1 on sampled tokens, the first end token included"),
        Field("loss_mask", token, sequence, "dataset (supervised)", 0, "1 on the tokens that are trained"),
        Field("token_versions", torch.int32, response, rollout, -1, "weight version that sampled each token"),
        Field("rollout_log_probs", float32, response, rollout, 0.0, "log-probs from the sampling pass"),
        Field(
            "routed_experts",
            torch.int16,
            ("B", "P+T", "layers", "top_k"),
            f"{rollout}, or compute_log_prob",
            -1,
            "experts that a mixture chose; -1: no record",
        ),
        Field("old_log_probs", float32, response, "compute_log_prob", 0.0, "log-probs before the update"),
        Field("ref_log_prob", float32, response, "compute_ref_log_prob", 0.0, "log-probs of the reference"),
        Field("teacher_log_probs", float32, response, "teacher", 0.0, "log-probs of the teacher of each row"),
        Field(CANDIDATES, torch.int32, ("B", "T", "K"), "teacher", 0, "the teacher's most likely tokens"),
        Field(
            "candidate_teacher_log_probs", float32, ("B", "T", "K"), "teacher", 0.0, "the teacher's log-probs of them"
        ),
        Field("ref_kl", float32, response, "compute_log_prob", 0.0, "KL to the reference over the whole vocabulary"),
        Field("entropys", float32, response, "compute_log_prob", 0.0, "entropy of each token's distribution"),
        Field("sum_pi_squared", float32, response, "compute_log_prob", 0.0, "sum of squared probabilities"),
        Field("values", float32, response, "compute_values (critic)", 0.0, "predicted return"),
        Field("rm_scores", float32, response, "compute_rm_score", 0.0, "reward model's scores on the last token"),
        Field("rm_score", object, row, "compute_rm_score", 0, "reward model's score; NaN where it has none"),
        Field("rm_truncated", object, row, "compute_rm_score", 0, "whether its input was cut"),
        Field("token_level_scores", float32, response, "reward", 0.0, "scores as the reward function gave them"),
        Field("token_level_rewards", float32, response, "advantage stage", 0.0, "scores after the KL penalty"),
        Field("advantages", float32, response, "advantage stage", 0.0, "what the policy is trained on"),
        Field("returns", float32, response, "advantage stage", 0.0, "what the critic is trained on"),
        Field("rollout_is_weights", float32, response, "rollout correction", 0.0, "importance weights"),
        Field(SHARES, float32, row, "training stage", 0.0, "share of a row in the tokens of its sample"),
        Field("positive", float32, row, "advantage stage", 0.0, "1 where the answer is right (VAPO)"),
        Field("positive_lm_weights", float32, response, "training stage", 0.0, "weights, of sum 1, of right answers"),
        Field("rollout_rs_mask", token, response, "rollout correction", 0, "response_mask without what was rejected"),
        Field(
            "reward_baselines", float32, row, "greedy rollout (ReMax)", 0.0, "reward of the prompt's greedy response"
        ),
    ):
        _FIELDS[field.name] = field


def _declare_columns_of_rows() -> None:
    row = ("B",)
    for field in (
        Field("unscorable", object, row, "reward", 0, "True where a sample has no score and is left out"),
        Field("uid", object, row, "trainer", 0, "group id: all samples of one prompt share it"),
        Field("data_source", object, row, "dataset", 0, "selects the scorer and groups validation metrics"),
        Field("reward_model", object, row, "dataset", 0, "style and ground truth"),
        Field("extra_info", object, row, "dataset", 0, "free dictionary of the row"),
        Field("raw_prompt", object, row, "dataset", 0, "the messages"),
        Field("raw_prompt_ids", object, row, "dataset", 0, "templated and truncated token ids, not padded"),
        Field("raw_input_ids", object, row, "dataset", 0, "token ids of the prompt without the template"),
        Field("full_prompts", object, row, "dataset", 0, "the prompt as text, with the template"),
        Field("index", object, row, "dataset", 0, "extra_info.index, else the number of the row"),
        Field("multi_modal_inputs", object, row, "agent loop", 0, "named arrays of one row's images and videos"),
        Field("__num_turns__", object, row, "agent loop", 0, "turns of the conversation"),
        Field(TURN_STATES, object, row, "environment loop", 0, "where each action begins, and the state it met"),
        Field("agent_name", object, row, "dataset", 0, "which agent loop runs the row"),
        Field("finish_reason", object, row, "agent loop", 0, "stop, length or abort"),
        Field("agent_error", object, row, "agent loop", 0, "what went wrong; None where nothing did"),
        Field("ended", object, row, "agent loop", 0, "why a conversation ended"),
        Field("trajectory", object, row, "agent loop", 0, "the pieces of a conversation of several turns"),
        Field(BEFORE, object, row, "agent loop", 0, "earlier trajectories of the sample; None where it has one"),
        Field(TRAJECTORY_NUMBER, object, row, "trainer", 0, "number of the row among those of its sample"),
        Field("tool_call_counts", object, row, "agent loop", 0, "calls of tools"),
        Field("tool_rewards", object, row, "agent loop", 0, "rewards of tools, in the order of the calls"),
        Field("turn_scores", object, row, "agent loop", 0, "rewards of the simulated user, one per turn"),
        Field("reward_scores", object, row, "agent loop", 0, "named rewards of the loop"),
        Field("reward_score", object, row, "agent loop", 0, "a score that the loop knows; None where it knows none"),
        Field("early_reward", object, row, "agent loop", 0, "result of a row that is scored while others sample"),
        Field("unfinished", object, row, "agent loop", 0, "state of a sample that resumes in a later batch"),
        Field("earlier", object, row, "trainer", 0, "the state of its samples, at the prompt that resumes"),
        Field("sample_index", object, row, "trainer", 0, "number of the sample among those of its prompt"),
        Field("learned", object, row, "trainer", 0, "whether the update learns from the row"),
        Field("__row__", object, row, "dataset", 0, "number of the prompt over all files"),
        Field("tools_kwargs", object, row, "dataset", 0, "arguments of tools, by tool"),
        Field("interaction_kwargs", object, row, "dataset", 0, "arguments of the simulated user"),
        Field("need_tools_kwargs", object, row, "dataset", 0, "whether the row needs arguments of tools"),
        Field("multi_modal_data", object, row, "dataset", 0, "images and videos"),
    ):
        _FIELDS[field.name] = field


_declare_standard_fields()
_declare_columns_of_rows()
