"""What a conversation has sampled, as a tree: a call continues an earlier answer, or begins a branch of its own.

One path from a root to a leaf is one trajectory: the first prompt, then sampled tokens (mask 1) and what the agent put
between them (mask 0). An agent that rewrites its history, samples a prompt twice or starts a second conversation under
the same key makes branches; what becomes of these is the caller's choice, and never silent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agent_loop.agent_data import AgentData
from verl.data.messages import Message
from verl.errors import RolloutError
from verl.rollout.base import Completion


@dataclass(eq=False)
class Answer:
    """One sampled answer.

    Args:
        parent: the answer that it continues; None for the first of a conversation.
        inserted: the tokens between the two; of a first answer its whole prompt.
        done: what the sampler gave, cut where a stop sequence ended it.
        key: the conversation up to and with this answer, as a later call shows it again.
        num_messages: messages so far without system prompts.
        place: messages before it, system prompts included.
        message: the answer as a chat template is shown it; None for completions.
        images: pictures among the tokens between the two, in order.
    """

    parent: Answer | None
    inserted: tuple[int, ...]
    done: Completion
    key: Hashable
    num_messages: int
    place: int = 0
    message: Message | None = None
    images: tuple[Any, ...] = ()
    children: list[Answer] = field(default_factory=list)

    @property
    def path(self) -> list[Answer]:
        """From the first answer to this one."""
        path: list[Answer] = []
        node: Answer | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and everything after it, this answer included."""
        return tuple(token for node in self.path for token in (*node.inserted, *node.done.token_ids))

    @property
    def seen(self) -> list[Any]:
        """All pictures before this answer, in the order of their tokens."""
        return [image for node in self.path for image in node.images]

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt."""
        first, *rest = self.path
        return len(first.done.token_ids) + sum(len(node.inserted) + len(node.done.token_ids) for node in rest)


class Record:
    """The answers of one conversation, in the order in which they reached the agent; some are in trajectories."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.trained: set[Answer] = set()

    def add(self, answer: Answer) -> None:
        """Keep an answer that the agent gets."""
        self.answers.append(answer)
        if answer.parent is not None:
            answer.parent.children.append(answer)

    def drop(self, answer: Answer) -> None:
        """Forget an answer that the agent did not get."""
        self.answers.remove(answer)
        if answer.parent is not None:
            answer.parent.children.remove(answer)

    def find(self, key: Hashable) -> Answer | None:
        """The newest answer with this key."""
        return next((answer for answer in reversed(self.answers) if answer.key == key), None)

    @property
    def leaves(self) -> list[Answer]:
        """Answers from which no call went on."""
        return [answer for answer in self.answers if not answer.children]

    def chosen(self, keep_last: bool) -> tuple[Answer, int]:
        """The end of the trajectory that is trained on, and how many sampled tokens are in other branches.

        Raises:
            RolloutError: no call at all, or branches that must not be (``keep_last`` is False).
        """
        leaves = self.leaves
        if not leaves:
            raise RolloutError("the agent called no model, so there is nothing to train on")
        if len(leaves) > 1 and not keep_last:
            raise RolloutError(
                f"the agent's {len(self.answers)} calls are {len(leaves)} conversations that do not go on from one "
                f"another: {_difference(leaves)}",
                key="branches",
                got="error",
                allowed="error, last, rows",
                fix="Send the earlier messages back as they were; or set branches in the loop's YAML: rows trains on "
                "each, last trains on the last conversation and counts what is left out.",
            )
        last = leaves[-1]
        trained_ids = {id(answer) for answer in last.path}
        return last, sum(len(a.done.token_ids) for a in self.answers if id(a) not in trained_ids)


def trajectory(
    last: Answer, text_of: Callable[[Sequence[int]], str], row: dict[str, Any], trained: set[Answer]
) -> AgentData:
    """The path to ``last``: its tokens, masks and log-probs, and for people a record of what was said.

    Args:
        trained: answers of other trajectories, which are part of the prompt; gets those of this one.
    """
    path = last.path
    shared = [answer for answer in path if answer in trained]
    first, *rest = path[len(shared) :]
    trained.update(path)
    data = AgentData(row, prompt_ids=[*(shared[-1].tokens if shared else ()), *first.inserted])
    _add_answer(data, first, text_of)
    for answer in rest:
        data.add_inserted(answer.inserted)
        data.record.append(_entry("agent", answer.inserted, 0, text_of))
        _add_answer(data, answer, text_of)
    return data


def _add_answer(data: AgentData, answer: Answer, text_of: Callable[[Sequence[int]], str]) -> None:
    data.add_sampled(answer.done)
    data.record.append(_entry("assistant", answer.done.token_ids, 1, text_of))


def _entry(role: str, ids: Sequence[int], mask: int, text_of: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {"role": role, "text": text_of(ids), "tokens": len(ids), "mask": mask}


def _difference(leaves: Sequence[Answer]) -> str:
    """Where the last two branches part, with the tokens of both sides."""
    one, other = leaves[-2].tokens, leaves[-1].tokens
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return f"they part at token {at}, where one has {list(one[at : at + 8])} and the other {list(other[at : at + 8])}"
