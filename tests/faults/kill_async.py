"""Kills runs again and again, starts them again as a user would, and looks whether anything was lost.

    python -m tests.faults.kill_async --kills 300 --seed 1 [--cases stream,ray] [--folder DIR] [--keep]

A case is a run of a small task that a tiny model learns in seconds. The run is hit by SIGKILL: at a random instant, in
a random one of its processes, or at a named point of `tests.faults.points` (in the middle of a step, a save, a weight
update, a line of the ledger). Then the same command is given again, until the run is complete. After each hit, its
ledger has to be readable; at the end

- the ledger says: lost 0, trained twice 0, and every prompt was trained on as often as there are epochs;
- so do the dumped samples of the steps, which know nothing of the ledger;
- no step is missing, and the last checkpoint is intact;
- the accuracy is that of a run that nothing disturbed; where numbers follow from counts, the weights are, to the bit;
- a case that follows its own record whenever it is started again (`trainer.replay_from`) has one schedule at the end: a
  run in one process that follows it from the beginning, and that nothing disturbs, has the weights to the bit.

Printed: kills by role and moment, how the runs ended, seconds. What is wrong ends the script with status 1, and leaves
the folder of the run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.forked_runs import (
    HANGS,
    Ended,
    Run,
    Server,
    assert_no_process_left,
    ledgers,
    metrics,
    newest,
    processes_of,
    samples,
    weights,
)
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.scorers import scorer
from verl.journal.ledger_reader import History
from verl.journal.spans import read_spans
from verl.json_text import read_json

PROMPTS, SAMPLES, GROUPS, LENGTH = 24, 4, 8, 8
"""Prompts of the data set, answers to each, prompts of a step, tokens of an answer."""
FOLLOW, RECORDS = "trainer.replay_from", "journal*.jsonl"
MODE, R, A = "trainer.v1.trainer_mode", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SCORER = scorer(f"sum(c.isdigit() for c in solution_str) / {LENGTH}")
COMMON = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "data.train_files=train.parquet",
    f"data.train_batch_size={GROUPS}",
    "data.max_prompt_length=32",
    f"data.max_response_length={LENGTH}",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.model.external_lib=tests.faults.points",
    f"{R}.n={SAMPLES}",
    f"{R}.calculate_log_probs=true",
    f"{R}.full_determinism=true",
    f"{A}.ppo_mini_batch_size=4",
    f"{A}.optim.lr=1e-2",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.default_local_dir=run",
    "trainer.rollout_data_dir=samples",
    "trainer.trace=true",
    "trainer.logger=[file]",
    "trainer.log_train_generations=0",
    "trainer.device=cpu",
)
STREAM = (
    f"{MODE}=fully_async",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=2",
)
ON_RAY = (
    "trainer.runtime=ray",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=false",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=2",
    f"{R}.agent.num_workers=2",
    f"{R}.checkpoint_engine.backend=shared_memory",
)
CONTROLLER_POINTS = {
    "scoring": 40, "shard": 60, "files": 6, "manifest": 6, "published": 6, "tracker": 6, "retention:renamed": 4,
    "ledger": 80, "torn": 80,
}  # fmt: skip
WORKER_POINTS = {"generation": 120, "backward": 24, "optimizer_begin": 12, "optimizer_end": 12, "take": 8}
"""Point -> the hit is at one of its first so many passages."""
BEYOND_ONE_PROCESS = {"send": 6, "loop": 80}
ROLES = {"ray::actor": "trainer", "ray::ColocatedRollout": "sampler", "ray::RolloutWorker": "rollout worker",
         "ray::ReplicaWorker": "sampler", "ray::SamplingWorker": "sampler"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run that is disturbed.

    Args:
        words: of its command line.
        life: mean seconds between its first moment in its folder and a hit at a random instant.
        same_bits: its numbers follow from counts, so that it has to end with the bits of an undisturbed run in one
            process.
        replayed: each start takes the recorded decisions of those before again, and the end is compared with a replay.
        share: of the kills.
        steps: its length.
        leaves: groups are dropped, or wait when it ends: it trains on some prompts more often than on others.
    """

    words: tuple[str, ...]
    life: float
    same_bits: bool = True
    replayed: bool = False
    leaves: bool = False
    share: float = 1.0
    steps: int = 30

    @property
    def on_ray(self) -> bool:
        return "trainer.runtime=ray" in self.words

    @property
    def points(self) -> dict[str, int]:
        return {**CONTROLLER_POINTS, **WORKER_POINTS, **(BEYOND_ONE_PROCESS if self.on_ray else {})}

    def arguments(self) -> list[str]:
        return [*COMMON, *self.words, f"trainer.total_training_steps={self.steps}"]


CASES = {
    "stream": Case((*STREAM, "trainer.runtime=local"), 0.3, share=4),
    "ahead": Case((f"{MODE}=one_step_off", "trainer.runtime=local"), 0.3, share=3),
    "sync": Case((f"{MODE}=sync", "trainer.runtime=local"), 0.3),
    "surplus": Case(
        (f"{MODE}=sync", "trainer.runtime=local", "algorithm.filter_groups.enable=true", "data.gen_batch_size=12"), 0.3,
        leaves=True,
    ),
    "unfinished": Case(
        (f"{MODE}=sync", "trainer.runtime=local", f"{R}.keep_unfinished=true", f"{R}.over_sample_rate=0.25",
         f"{R}.max_num_seqs=12"), 0.3, leaves=True,
    ),
    "ray": Case((*STREAM, *ON_RAY, f"{R}.requests_at_update=pause"), 1.5, same_bits=False, share=1.5),
    "ray_abort": Case(
        (*STREAM, *ON_RAY, f"{R}.requests_at_update=abort", "trainer.v1.sampler.order=completion",
         "trainer.v1.sampler.max_off_policy_strategy=wait"), 1.5, same_bits=False, share=0.5,
    ),
    "ray_replay": Case(
        (*STREAM, *ON_RAY, f"{R}.requests_at_update=pause", "trainer.v1.sampler.order=completion",
         "trainer.v1.sampler.max_off_policy_strategy=wait"), 1.5, same_bits=False, replayed=True, share=0.5,
    ),
    "ray_ahead": Case((f"{MODE}=one_step_off", *ON_RAY), 1.5, share=1),
    "ray_sync": Case(("trainer.runtime=ray", "trainer.n_gpus_per_node=1"), 1.5, share=0.5),
}  # fmt: skip


@dataclass
class Tally:
    """What was done, and how it went."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By role and moment."""
    ends: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    complete: int = 0
    seconds: float = 0.0

    def table(self) -> str:
        rows = [f"{role:16}{moment:20}{count:5}" for (role, moment), count in sorted(self.kills.items())]
        ends = [f"{count:5}  {words}" for words, count in self.ends.most_common()]
        summary = (
            f"{self.kills.total()} kills, {self.starts} starts, {self.complete} complete runs, {self.seconds:.0f} s"
        )
        return "\n".join([summary, "role            moment              kills", *rows, "how runs ended:", *ends])


class Disturbed:
    """One run of a case in a folder, hit until the kills are used up.

    Args:
        whole: the run that nothing disturbed.
    """

    def __init__(self, server: Server, case: Case, folder: Path, whole: Path, chance: random.Random, tally: Tally):
        self.server, self.case, self.folder, self.whole = server, case, prepare(folder), whole
        self.chance, self.tally = chance, tally

    def hit(self, most: int) -> int:
        """Start the run until it is complete or so many processes were killed; returns their number."""
        killed = 0
        while killed < most:
            number, ended = self._start_and_hit()
            killed += number
            self._look_at_the_ledger()
            if ended.status == 0:
                return killed
        return killed

    def finish(self) -> None:
        """See the run through, and check everything that it left."""
        self.tally.starts += 1
        ended = self.server.start(self.folder, self._arguments()).wait()
        assert ended.status == 0, f"undisturbed, it ended with {ended.status}\n{ended.output[-4000:]}"
        self.tally.complete += 1
        check(self.case, self.folder, self.whole)
        if self.case.replayed:
            again = self.folder.with_name(f"{self.folder.name}_again")
            undisturbed(self.server, self.case, again, f"{FOLLOW}={self.folder / 'run'}")
            assert_same_weights(self.case, self.folder, again)
            print(f"{self.folder.name}: its replay in one process has the same bits", flush=True)
            shutil.rmtree(again)

    def _arguments(self) -> list[str]:
        """Of the next start; a record is there once a start before has taken a decision."""
        has_record = self.case.replayed and any(path.stat().st_size for path in (self.folder / "run").glob(RECORDS))
        return [*self.case.arguments(), *([f"{FOLLOW}=run"] if has_record else [])]

    def _start_and_hit(self) -> tuple[int, Ended]:
        (self.folder / "hits").unlink(missing_ok=True)
        begun, moment, fault = time.monotonic(), "", ""
        if self.chance.random() < (0.3 if self.case.on_ray else 0.5):
            moment = self.chance.choice(sorted(self.case.points))
            fault = f"{moment}:{self.chance.randint(1, self.case.points[moment])}:KILL"
        run = self.server.start(self.folder, self._arguments(), fault)
        self.tally.starts += 1
        killed = 0 if fault else self._at_an_instant(run)
        ended = run.wait()
        if fault and (self.folder / "hits").exists():
            for line in (self.folder / "hits").read_text().splitlines():
                pid = int(line.split()[0])
                role = "controller" if pid == run.pid else _role_of_point(moment)
                self.tally.kills[role, moment] += 1
                killed += 1
        self._judge(ended, killed, fault, time.monotonic() - begun)
        return killed, ended

    def _at_an_instant(self, run: Run) -> int:
        """Kill processes of a run as it goes, until one kill ends it; returns how many were killed."""
        killed, moment = 0, "random"
        if self.chance.random() < 0.2:
            moment = "start"
            time.sleep(self.chance.uniform(0.1, 12.0 if self.case.on_ray else 1.2))
        else:
            self._until_it_holds_its_folder(run)
            time.sleep(self.chance.expovariate(1 / self.case.life))
        victims = dict(self._victims(run))
        while victims:
            others = sorted({*victims.values()} - {"controller"})
            role = self.chance.choice(others) if others and self.chance.random() < 0.8 else "controller"
            pid = self.chance.choice(sorted(pid for pid, its in victims.items() if its == role))
            if _kill(pid):
                self.tally.kills[role, moment] += 1
                killed += 1
            if role == "controller" or not self.case.on_ray:
                break
            time.sleep(self.chance.expovariate(1 / self.case.life))  # a run that bears the loss is hit again
            victims = dict(self._victims(run))
        return killed

    def _victims(self, run: Run) -> Iterator[tuple[int, str]]:
        if run.lives():
            yield run.pid, "controller"
        if self.case.on_ray:
            for pid, words in processes_of(self.folder).items():
                yield from ((pid, role) for title, role in ROLES.items() if words.startswith(title))

    def _until_it_holds_its_folder(self, run: Run) -> None:
        lock, end = self.folder / "run/.lock", time.monotonic() + HANGS
        while time.monotonic() < end and run.lives():
            if lock.exists() and f'"pid": {run.pid},' in lock.read_text():
                return
            time.sleep(0.005)

    def _judge(self, ended: Ended, killed: int, fault: str, seconds: float) -> None:
        """A run ends because it is complete, or because of the kill, and in the latter case says what was lost."""
        said = [line for line in ended.output.splitlines() if line.startswith("error:")]
        how = {0: "complete", -signal.SIGKILL: "the controller was killed"}.get(ended.status, f"status {ended.status}")
        self.tally.ends[f"{how}: {_without_numbers(said[0])}" if said else how] += 1
        print(f"{self.folder.name} {fault or 'instant'}: {killed} killed, {how}, {seconds:.1f} s", flush=True)
        if ended.status not in (0, -signal.SIGKILL):
            assert killed and said, f"{fault}: it ended with {ended.status}\n{ended.output[-4000:]}"
        if self.case.on_ray:
            assert_no_process_left(self.folder, besides=("Agent",))

    def _look_at_the_ledger(self) -> None:
        for path in ledgers(self.folder):
            assert not (faults := History.of(path).faults), f"{path}: {faults}"


def check(case: Case, folder: Path, whole: Path) -> None:
    """A complete run has lost nothing, and doubled nothing.

    Raises:
        AssertionError: it has.
    """
    each = case.steps * GROUPS // PROMPTS * SAMPLES
    path = newest(ledgers(folder))
    history = History.of(path)
    assert not history.faults, history.faults
    assert case.leaves or not history.open, [str(one) for one in history.open.values()]
    assert history.trained == case.steps * GROUPS * SAMPLES, history.trained
    of_run = [one for one in history.samples if one.stage == "trained"]
    assert case.leaves or Counter(one.row for one in of_run) == dict.fromkeys(range(PROMPTS), each)
    twice = [key for key, count in Counter((one.uid, one.sample) for one in of_run).items() if count > 1]
    assert not twice, twice
    dumped = [read_json(line) for text in samples(folder).values() for line in text.split("\n") if line]
    assert case.leaves or {*Counter(row["input"] for row in dumped).values()} == {each}
    assert len(dumped) == history.trained and len(samples(folder)) == case.steps
    assert [row["step"] for row in metrics(folder)] == list(range(1, case.steps + 1))
    assert {one.step for one in read_spans(folder / "run")} >= set(range(1, case.steps + 1))
    ours, theirs = accuracy(folder), accuracy(whole)
    print(f"{folder.name}: accuracy {ours:.3f}, undisturbed {theirs:.3f}", flush=True)
    assert abs(ours - theirs) < 0.1, (ours, theirs)
    if case.same_bits:
        assert_same_weights(case, folder, whole)


def assert_same_weights(case: Case, folder: Path, other_folder: Path) -> None:
    """Weights and optimizers of the last checkpoints, to the bit."""
    last = f"run/global_step_{case.steps}"
    one, other = weights(folder / last), weights(other_folder / last)
    one, other = ({key: value for key, value in both.items() if "rng" not in key[1]} for both in (one, other))
    assert one.keys() == other.keys() and one
    assert [key for key in one if not one[key].equal(other[key])] == []


def accuracy(folder: Path) -> float:
    """Mean score of the last five steps."""
    scores = [row["critic/score/mean"] for row in metrics(folder)[-5:]]
    return sum(scores) / len(scores)


def prepare(folder: Path) -> Path:
    """Model, prompts and scoring file."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model_dir(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"q{number}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(PROMPTS)
    ]
    write_prompts(folder / "train.parquet", rows)
    (folder / "scorer.py").write_text(SCORER)
    return folder


def _role_of_point(point: str) -> str:
    return {"generation": "sampler", "take": "sampler", "loop": "rollout worker"}.get(point, "trainer")


def _without_numbers(line: str) -> str:
    return "".join("#" if c.isdigit() else c for c in line)[:150]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def undisturbed(server: Server, case: Case, folder: Path, *more: str) -> Path:
    """The case without a hit, in one process, which is faster."""
    prepare(folder)
    words = [word for word in case.arguments() if word not in ON_RAY]
    ended = server.start(folder, [*words, "trainer.runtime=local", *more]).wait()
    assert ended.status == 0, ended.output[-4000:]
    return folder


def disturb(server: Server, name: str, case: Case, kills: int, place: Path, seed: int, tally: Tally) -> None:
    """Use up the kills of a case, with as many runs as that takes."""
    whole, chance, left, number = undisturbed(server, case, place / f"{name}_whole"), random.Random(seed), kills, 0
    while left > 0:
        number += 1
        run = Disturbed(server, case, place / f"{name}_{number}", whole, chance, tally)
        left -= run.hit(left)
        run.finish()
        shutil.rmtree(run.folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--folder", type=Path, default=None, help="for the runs; a new one by default")
    asked = parser.parse_args(argv)
    chosen = {name: CASES[name] for name in asked.cases.split(",")}
    place = asked.folder or Path(tempfile.mkdtemp(prefix="killed"))
    total, left, tally, begun = sum(case.share for case in chosen.values()), asked.kills, Tally(), time.monotonic()
    server = Server()
    try:
        for position, (name, case) in enumerate(chosen.items(), start=1):
            kills = left if position == len(chosen) else round(asked.kills * case.share / total)
            left -= kills
            disturb(server, name, case, kills, place, asked.seed, tally)
    except AssertionError as error:
        print(f"FAULT: {error}\nThe folder is {place}", file=sys.stderr)
        return 1
    finally:
        server.close()
        tally.seconds = time.monotonic() - begun
        print(tally.table())
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
