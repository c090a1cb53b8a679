"""The bound of the sample queue: explored at random, asserted at run time, and a wrong admission is caught."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from verl.trainer.ppo import admission as queues
from verl.trainer.ppo.admission import OVERDUE, BoundBroken, GroupAdmission, GroupQueue

SHARES = (Fraction(0), Fraction("0.1"), Fraction("0.5"), Fraction(1), Fraction("1.5"), Fraction(3))


def random_bound(draw: random.Random) -> GroupAdmission:
    chunk, chunks = draw.randint(1, 3), draw.randint(1, 3)
    ahead = draw.choice(SHARES)
    bound = GroupAdmission(chunk * chunks, chunk, ahead, in_order=draw.random() < 0.4)
    more = draw.choice((None, -(-ahead // 1) + draw.randint(0, 2)))
    return replace(bound, staleness=more, overdue=draw.choice(OVERDUE))


class World:
    """Samplers and a trainer around a queue, which do what chance says, in any order that their parts allow."""

    def __init__(self, draw: random.Random, make=GroupQueue):
        self.draw, self.bound = draw, random_bound(draw)
        self.queue = make(self.bound)
        self.tokens: dict[int, list[int]] = {}
        """Versions of the tokens that the samplers have drawn, by group."""
        self.fate: Counter[str] = Counter()
        self.prompts = 0

    def run(self, events: int, steps: int = 2) -> None:
        for _ in range(events):
            self.draw.choice((self.admit, self.sample, self.sample, self.end, self.end, self.train, self.publish))()
        self.check_nothing_is_lost()
        for _ in range(steps):  # whatever came before, more steps are possible
            self.queue.publish(self.queue.step)
            target = (self.queue.step + 1) * self.bound.groups
            while self.queue.trained < target:
                self.admit(all_of_them=True)
                for number in self.running():
                    self.finish(number)
                before = self.queue.trained, self.fate["dropped"]
                self.train()
                assert (self.queue.trained, self.fate["dropped"]) != before, "the queue is stuck"

    def running(self) -> list[int]:
        return [entry.number for entry in self.queue if not entry.is_complete]

    def admit(self, all_of_them: bool = False) -> None:
        room = self.queue.room()
        for _ in range(room if all_of_them else self.draw.randint(0, room)):
            number = self.queue.admit(f"prompt {self.prompts}")
            assert number == self.prompts
            self.prompts += 1
            self.tokens[number] = []
        assert len(self.queue) <= self.bound.limit(version=0)

    def sample(self) -> None:
        """One more token of some group, by the weights that sampling has now."""
        for number in self.running():
            if self.draw.random() < 0.5:
                self.tokens[number].append(self.queue.version)

    def end(self) -> None:
        running = self.running()
        if not running:
            return
        number, luck = self.draw.choice(running), self.draw.random()
        if luck < 0.7:
            self.finish(number)
        elif luck < 0.85:
            self.tokens[number] = []
            self.queue.begin_again(number)
        else:
            why = self.draw.choice(("filtered", "failed"))
            self.queue.lose(number, why)
            self.fate[why] += 1

    def finish(self, number: int) -> None:
        self.tokens[number].append(self.queue.version)
        known = self.draw.random() < 0.5
        assert self.queue.complete(number, f"samples {number}", min(self.tokens[number]) if known else None)

    def train(self) -> None:
        late = self.queue.drop_overdue()
        self.fate["dropped"] += len(late)
        if not self.queue.is_ready():
            return
        step = self.queue.trained // self.bound.groups
        chunk = self.queue.take()
        assert len(chunk) == self.bound.chunk
        self.fate["trained"] += len(chunk)
        for entry in chunk:
            assert (entry.prompt, entry.samples) == (f"prompt {entry.number}", f"samples {entry.number}")
            self.check_age(max(step - version for version in self.tokens.pop(entry.number)))
        if self.bound.in_order:
            assert [entry.number for entry in chunk] == sorted(entry.number for entry in chunk)

    def check_age(self, age: int) -> None:
        """By the versions that the samplers drew with, whatever the queue wrote down."""
        if self.bound.in_order:
            ahead = self.bound.groups * self.bound.ahead // 1
            assert age <= -(-ahead // self.bound.groups), "staler than the share of a step that may be ahead"
        elif self.bound.overdue != "reweight":
            assert age <= self.bound.allowed, "staler than the bound"

    def publish(self) -> None:
        """The newest weights, or an older step's that were on their way."""
        if self.queue.step > self.queue.version:
            self.queue.publish(self.draw.randint(self.queue.version + 1, self.queue.step))

    def check_nothing_is_lost(self) -> None:
        assert sum(self.fate.values()) + len(self.queue) == self.prompts == self.queue.counts["admitted"]
        assert self.fate == Counter({name: self.queue.counts[name] for name in self.fate})


def test_no_schedule_among_ten_thousand_trains_on_a_token_that_is_too_stale():
    ages: Counter[str] = Counter()
    for seed in range(10_000):
        world = World(random.Random(seed))
        world.run(events=20)
        ages["in order" if world.bound.in_order else world.bound.overdue] += world.fate["trained"]
    assert min(ages.values()) > 5_000, "every rule was explored"


class Broken(GroupQueue):
    """Admits a step more than the formula."""

    def room(self) -> int:
        return super().room() + self.bound.groups


def explore(make, schedules: int) -> Counter[str]:
    """Schedules that end well, by what stopped the others."""
    ends: Counter[str] = Counter()
    for seed in range(schedules):
        world = World(random.Random(seed), make)
        world.bound = replace(world.bound, in_order=True)
        world.queue.bound = world.bound
        world.admit = lambda all_of_them=False, world=world: [
            world.tokens.setdefault(world.queue.admit(f"prompt {world.queue.counts['admitted']}"), [])
            for _ in range(world.queue.room())
        ]
        world.check_nothing_is_lost = lambda: None
        try:
            world.run(events=30, steps=6)
        except BoundBroken:
            ends["asserted"] += 1
        except AssertionError as error:
            assert "staler than the share" in str(error)
            ends["explored"] += 1
        else:
            ends["well"] += 1
    return ends


def test_an_admission_rule_that_is_off_is_caught_by_the_assertion_and_by_the_exploration(monkeypatch):
    assert explore(GroupQueue, 50) == {"well": 50}
    assert explore(Broken, 50)["asserted"] > 40
    monkeypatch.setattr(queues, "check_version", lambda *_: None)  # a fault in both places at once
    assert explore(Broken, 50)["explored"] > 40


def test_the_formula_by_hand():
    """T = 4 groups a step, half a step ahead: 6 at first, then 4 more with every version."""
    bound = GroupAdmission(groups=4, chunk=2, ahead=Fraction("0.5"))
    queue = GroupQueue(bound)
    assert (bound.limit(version=0), bound.allowed, queue.room()) == (6, 1, 6)
    numbers = [queue.admit(None) for _ in range(6)]
    assert queue.room() == 0
    for number in numbers[:4]:
        queue.complete(number, number)
    assert [entry.number for entry in queue.take()] == [0, 1]
    assert queue.room() == 0, "what is trained on makes no room before its weights are there"
    queue.take()
    queue.publish(1)
    assert queue.room() == 4 and queue.step == 1 and not queue.is_ready()
    queue.complete(5, "first"), queue.complete(4, "second")
    assert [(entry.number, entry.version) for entry in queue.take()] == [(4, 0), (5, 0)]
    assert GroupAdmission(10, 10, Fraction("0.1")).limit(2) == 31 and GroupAdmission(4, 4).limit(7) == 32


def test_what_is_overdue_is_waited_for_dropped_or_trained_on():
    """One group that never ends in time, the others at once: S = 1, one group ahead, two groups a step."""

    def run(overdue: str) -> GroupQueue:
        queue = GroupQueue(GroupAdmission(2, 2, Fraction("0.5"), staleness=1, in_order=False, overdue=overdue))
        slow = queue.admit("slow")
        for _ in range(3):
            while queue.room():
                queue.complete(queue.admit("quick"), "samples")
            queue.drop_overdue()
            if not queue.is_ready():
                return queue
            queue.take()
            queue.publish(queue.step)
        queue.complete(slow, "samples")
        return queue

    waits = run("wait")
    assert (waits.step, waits.counts["trained"]) == (1, 2), "step 1 is the last for a group of version 0"
    waits.complete(0, "samples")
    assert 0 in [entry.number for entry in waits.take()]
    drops = run("drop")
    assert drops.counts["dropped"] == 1 and "slow" not in [entry.prompt for entry in drops]
    weighs = run("reweight")
    while weighs.room():
        weighs.complete(weighs.admit("quick"), "samples")
    assert weighs.step == 3 and 0 in [entry.number for entry in [*weighs.take(), *weighs]]


def test_a_queue_goes_on_from_its_state_and_samples_again_what_was_in_flight():
    queue = GroupQueue(GroupAdmission(2, 1, Fraction(1)), version=0)
    for prompt in "abcd":
        queue.admit(prompt)
    queue.complete(2, "C"), queue.complete(0, "A")
    queue.take()
    queue.lose(3, "filtered")
    state = queue.state_dict()
    entries = list(queue)
    later = GroupQueue(queue.bound)
    later.load_state_dict(state, [e.prompt for e in entries], [e.samples for e in entries if e.is_complete])
    assert [(e.number, e.prompt, e.samples) for e in later] == [(1, "b", None), (2, "c", "C")]
    assert (later.room(), later.trained, later.counts) == (queue.room(), 1, queue.counts)
    assert later.complete(1, "B") and [entry.samples for entry in later.take()] == ["B"]
    assert later.admit("e") == 4 == queue.admit("e")


def test_a_token_older_than_its_groups_admission_is_a_fault():
    queue = GroupQueue(GroupAdmission(1, 1), version=3, trained=3)
    with pytest.raises(BoundBroken, match="admitted under version 3, and has older tokens"):
        queue.complete(queue.admit("a"), "A", version=2)
