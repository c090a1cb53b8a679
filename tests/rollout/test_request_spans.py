"""Requests that draw again what they drew: from the same weights, in the same places, at whichever replica."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.harness.plugin import within
from tests.harness.samplers import prompt
from tests.rollout.test_updates_in_flight import hf, turns, weights
from verl.errors import ReplayError
from verl.journal.schedule import Draws, Notes, counts_of
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.service import SamplerService

CONVERSATIONS = [(f"row{row}", sample) for row in range(3) for sample in range(2)]
NAMES = [f"{uid}-{sample}" for uid, sample in CONVERSATIONS]
Answers = dict[str, Completion]


async def converse(service, die, uid: str, sample: int, answers: Answers) -> None:
    """Two turns, the second on what the first one drew, with a pause of any length before each."""
    tokens = prompt(5, len(uid) + sample)
    for turn in range(2):
        await turns(die.randrange(20))
        key = uid if turn == 0 else f"{uid}/{turn}"
        sampling = SamplingParams(max_tokens=12)
        request = Request(f"{uid}-{sample}-{turn}", tokens, sampling, uid=key, sample_index=sample)
        answers[request.id] = await service.generate(request)
        tokens = (*tokens, *answers[request.id].token_ids)


async def update(service: SamplerService, version: int) -> None:
    for replica in service.replicas:
        await replica.sampler.update_weights(weights(version), version)
    await service.publish(version)


def explored(at_update: str, seed: int) -> tuple[Answers, dict[str, Notes]]:
    """Two replicas; requests begin, and weights arrive, when a die says so."""
    die = random.Random(seed)

    async def run():
        service = SamplerService({name: hf(at_update, full_determinism=True) for name in ("a", "b")})
        answers: Answers = {}
        await service.publish(0)
        service.spans.note(NAMES)
        tasks = [asyncio.ensure_future(converse(service, die, *one, answers)) for one in CONVERSATIONS]
        for version in (1, 2, 3):
            await turns(die.randrange(3, 12))
            await update(service, version)
        await asyncio.gather(*tasks)
        return answers, service.spans.notes(NAMES)

    return asyncio.run(asyncio.wait_for(run(), 60))


def spans(notes: dict[str, Notes], answers: Answers, gone: int = 0) -> dict[str, Draws]:
    """What the notes say, with the tokens of versions before ``gone``."""
    made = {}
    for name, its in notes.items():
        counts = tuple((version, count) for version, count in counts_of({"spans": its.spans}))
        given = sum(count for version, count in counts if version < gone)
        done = answers[name]
        made[name] = Draws(counts, its.finish, done.token_ids[:given], done.log_probs[:given])
    return made


def followed(wanted: dict[str, Draws], first: int = 0, times: int = 1) -> tuple[Answers, dict[str, Notes]]:
    """One replica, whose weights arrive once all that is of earlier ones is drawn; it begins with version ``first``.

    Args:
        times: each conversation is begun so often, by processes of which all but one are lost.
    """

    async def run():
        service = SamplerService({"one": hf("wait", full_determinism=True)})
        answers: Answers = {}
        await update(service, first) if first else await service.publish(0)
        service.spans.follow(NAMES, wanted)
        service.spans.note(NAMES)
        die = random.Random(99)
        tasks = [asyncio.ensure_future(converse(service, die, *one, answers)) for one in CONVERSATIONS * times]
        try:
            for version in range(first + 1, 4):
                counts = {name: sum(n for v, n in its.counts if v < version) for name, its in wanted.items()}
                drawn = asyncio.ensure_future(service.spans.until_drawn(counts))
                while not drawn.done():
                    await turns(1)
                    for task in filter(asyncio.Task.done, tasks):
                        task.result()
                await update(service, version)
            await asyncio.gather(*tasks)
        finally:  # an error that nobody asks for is told at any later time
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers, service.spans.notes(NAMES)

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("at_update", ["pause", "abort"])
def test_requests_that_weights_met_anywhere_draw_the_same_bits_again_at_another_replica(at_update):
    mixed = 0
    for seed in range(2):
        answers, notes = explored(at_update, seed)
        assert {span[0] for its in notes.values() for span in its.spans} == {"a", "b"}
        mixed += sum(len(counts_of({"spans": its.spans})) > 1 for its in notes.values())
        assert followed(spans(notes, answers))[0] == answers
    assert mixed > 3


def test_tokens_whose_weights_are_gone_are_taken_as_they_were():
    answers, notes = explored("pause", 1)
    again, served = followed(spans(notes, answers, gone=2), first=2)
    assert again == answers
    assert {name: counts_of({"spans": its.spans}) for name, its in served.items()} == {
        name: counts_of({"spans": its.spans}) for name, its in notes.items()
    }


def test_a_conversation_that_begins_anew_while_it_is_followed_gets_the_answers_that_it_had():
    """Also after the weights that drew them are gone, and its notes are those of one run."""
    answers, notes = explored("pause", 1)
    once = followed(spans(notes, answers))
    assert followed(spans(notes, answers), times=2) == once and once[0] == answers


def test_a_request_that_cannot_draw_what_it_drew_says_so():
    answers, notes = explored("pause", 1)
    wanted = spans(notes, answers)
    name, its = next(iter(wanted.items()))
    *before, (version, count) = its.counts
    with pytest.raises(ReplayError, match=f"request {name} drew .* the recorded run drew .{version}, {count + 1}"):
        followed(wanted | {name: Draws((*before, (version, count + 1)), its.finish)})
    with pytest.raises(ReplayError, match="the weights are those of version 2"):
        followed(wanted, first=2)
    del wanted[name]
    with pytest.raises(ReplayError, match=f"request {name} is one that the recorded run did not make"):
        followed(wanted)


@within(60)
async def test_a_conversation_that_begins_anew_leaves_only_the_notes_of_its_last_run():
    """The process of its loop was lost after its second turn; the next one ends after the first."""

    service = SamplerService({"a": hf("pause", full_determinism=True)})
    await service.publish(0)
    service.spans.note(["row-0"])
    for turn in (0, 1, 0):
        await service.generate(Request(f"row-0-{turn}", prompt(5, 1), SamplingParams(max_tokens=4), uid="row"))
    notes = service.spans.notes(["row-0"])
    assert {name: counts_of({"spans": its.spans}) for name, its in notes.items()} == {"row-0-0": [[0, 4]]}
