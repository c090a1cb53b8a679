"""The few tokens that every replica draws after a weight sync, so that the trainer can compute their log-probs too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import to_batch
from verl.config.schema.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.reload_check import probe_tokens

ROWS, LENGTH = 4, 16
"""Prompts, and the most tokens of a prompt and of a response."""
REPLICA = "replica"


def requests_of(rollout: RolloutConfig, vocab_size: int, version: int) -> list[Request]:
    """Prompts that mean nothing; their responses are drawn at the temperature at which the trainer computes log-probs.

    Args:
        rollout: section of the configuration.
        vocab_size: token ids are below it.
        version: of the weights; other tokens are drawn with each.
    """
    length = min(LENGTH, rollout.prompt_length)
    tokens = probe_tokens(vocab_size, ROWS * length)
    sampling = SamplingParams(
        temperature=rollout.temperature, max_tokens=min(LENGTH, rollout.response_length), ignore_eos=True
    )
    return [
        Request(
            f"probe-{row}", tuple(tokens[row * length :][:length]), sampling, uid=f"probe-{version}", sample_index=row
        )
        for row in range(ROWS)
    ]


def batch_of(requests: Sequence[Request], answers: Mapping[str, Sequence[Completion]], pad_token_id: int) -> DataProto:
    """A row for each answer, with the column ``replica``."""
    rows = [
        AgentLoopOutput(
            list(request.token_ids),
            list(done.token_ids),
            [1] * len(done.token_ids),
            list(done.log_probs),
            token_versions=list(done.token_versions),
            extra_fields={REPLICA: name},
        )
        for name, answered in answers.items()
        for request, done in zip(requests, answered, strict=True)
    ]
    return to_batch(rows, pad_token_id)
