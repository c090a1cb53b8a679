"""Kills runs of every schedule again and again, resumes them, and counts what was lost, doubled or changed.

    python -m tests.faults.kills --kills 200 --seed 0 [--ray] [--cases sync,partial] [--first-commit REV]

A case is a run of a small task that a tiny model learns in seconds. The run is hit by SIGKILL: at a random instant, in
a random one of its processes, or at a named point of `tests.faults.points` (in the middle of a step, a save, a weight
update, an entry of the journal). Then the same command is given again, until the run is complete. After each hit its
journal has to be readable. At the end

- the ledger says which samples were lost or trained on twice, and every prompt was trained on once per epoch;
- the dumped samples of the steps, which know nothing of the ledger, say the same;
- no step is missing, and the last checkpoint is intact;
- weights and optimizers are those of a run without a kill, to the bit, where numbers follow from counts. Elsewhere the
  accuracy is that run's. A case that follows its record (`trainer.replay_from`) is compared with a replay in one
  process.

With ``--first-commit`` each run begins with the code of an earlier commit, and is hit as one of its first
checkpoints is in place.

Printed: per schedule, as it ends, the kills, the starts that continued from a checkpoint, and the samples that were
lost or doubled; at the end all of them, and kills by role and moment. A loss ends the program with status 1 and leaves
the folder of the run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.forked_runs import (
    ROOT,
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
from tests.harness.waiting import wait_until
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
    "scoring": 4, "shard": 40, "files": 3, "manifest": 3, "published": 3, "tracker": 3, "retention:renamed": 2,
    "ledger": 30, "torn": 30,
}  # fmt: skip
WORKER_POINTS = {"generation": 30, "backward": 8, "optimizer_begin": 6, "optimizer_end": 6, "take": 4}
"""Point -> the hit is at one of its first passages since the start, at most this one: within a few steps."""
BEYOND_ONE_PROCESS = {"send": 3, "loop": 40}
ROLES = {"ray::actor": "trainer", "ray::ColocatedRollout": "sampler", "ray::RolloutWorker": "rollout worker",
         "ray::ReplicaWorker": "sampler", "ray::SamplingWorker": "sampler",
         "verl.rewards.worker": "reward"}  # fmt: skip
"""Part of a command line -> what the process does; without Ray there are the controller and processes of rewards."""


@dataclass(frozen=True)
class Case:
    """A run that is disturbed.

    Args:
        words: of its command line.
        same_bits: its numbers follow from counts: it ends with the bits of a run in one process without a kill.
        replayed: each start takes the recorded decisions of those before again, and the end is compared with a replay.
        leaves: groups are dropped, or wait when it ends: it trains on some prompts more often than on others.
        steps: its length.
    """

    words: tuple[str, ...]
    same_bits: bool = True
    replayed: bool = False
    leaves: bool = False
    steps: int = 9

    @property
    def on_ray(self) -> bool:
        return "trainer.runtime=ray" in self.words

    @property
    def points(self) -> dict[str, int]:
        return {**CONTROLLER_POINTS, **WORKER_POINTS, **(BEYOND_ONE_PROCESS if self.on_ray else {})}

    @property
    def trained(self) -> int:
        """Samples that a complete run was trained on."""
        return self.steps * GROUPS * SAMPLES

    def arguments(self) -> list[str]:
        return [*COMMON, *self.words, f"trainer.total_training_steps={self.steps}"]


LOCAL = ("trainer.runtime=local",)
PARTIAL = (f"{R}.keep_unfinished=true", f"{R}.over_sample_rate=0.25", f"{R}.max_num_seqs=12")
ANY_ORDER = ("trainer.v1.sampler.order=completion", "trainer.v1.sampler.max_off_policy_strategy=wait")
CASES = {
    "sync": Case((f"{MODE}=sync", *LOCAL)),
    "one_step_off": Case((f"{MODE}=one_step_off", *LOCAL)),
    "fully_async": Case((*STREAM, *LOCAL)),
    "partial": Case((f"{MODE}=sync", *PARTIAL, *LOCAL), leaves=True),
    "filtered": Case(
        (f"{MODE}=sync", "algorithm.filter_groups.enable=true", "data.gen_batch_size=12", *LOCAL), leaves=True
    ),
}
RAY_CASES = {
    "ray_sync": Case(("trainer.runtime=ray", "trainer.n_gpus_per_node=1")),
    "ray_one_step_off": Case((f"{MODE}=one_step_off", *ON_RAY), same_bits=False, steps=30),
    "ray_fully_async": Case((*STREAM, *ON_RAY, f"{R}.requests_at_update=pause"), same_bits=False, steps=30),
    "ray_partial": Case((*STREAM, *ON_RAY, f"{R}.requests_at_update=abort", *ANY_ORDER), same_bits=False, steps=30),
    "ray_replay": Case(
        (*STREAM, *ON_RAY, f"{R}.requests_at_update=pause", *ANY_ORDER), same_bits=False, replayed=True, steps=30
    ),
}


@dataclass
class Tally:
    """What was done to the runs of one case, and how they ended."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By role and moment."""
    ends: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    resumed: int = 0
    complete: int = 0
    lost: int = 0
    doubled: int = 0
    equal: int = 0
    """Complete runs with the bits of the run that they are compared with."""


HEAD = "schedule          kills  starts  resumed  complete  lost  doubled  equal bits"


def row(name: str, tally: Tally, case: Case) -> str:
    """Kills and losses of one schedule."""
    equal = f"{tally.equal} of {tally.complete}" if case.same_bits or case.replayed else "not promised"
    return (
        f"{name:16}{tally.kills.total():7}{tally.starts:8}{tally.resumed:9}{tally.complete:10}{tally.lost:6}"
        f"{tally.doubled:9}  {equal}"
    )


def table(tallies: Mapping[str, Tally], cases: Mapping[str, Case], seconds: float) -> str:
    """Kills and losses by schedule, kills by role and moment, and how runs ended."""
    kills, ends = Counter[tuple[str, str]](), Counter[str]()
    for tally in tallies.values():
        kills, ends = kills + tally.kills, ends + tally.ends
    lines = [HEAD, *(row(name, tally, cases[name]) for name, tally in tallies.items())]
    lines += ["", "role            moment              kills"]
    lines += [f"{role:16}{moment:20}{count:5}" for (role, moment), count in sorted(kills.items())]
    lines += ["", "how runs ended:", *(f"{count:5}  {words}" for words, count in ends.most_common())]
    return "\n".join([*lines, "", f"{kills.total()} kills, {seconds:.0f} s"])


@dataclass(frozen=True)
class Undisturbed:
    """The run that the others are compared with: its folder, and the seconds that it took."""

    folder: Path
    seconds: float


class Disturbed:
    """One run of a case in a folder, hit until the kills are used up.

    Args:
        first: of an earlier commit: it begins the run, which is hit once a checkpoint is in place.
    """

    def __init__(
        self,
        server: Server,
        case: Case,
        folder: Path,
        undisturbed: Undisturbed,
        chance: random.Random,
        tally: Tally,
        first: Server | None = None,
    ):
        self.server, self.case, self.folder, self.undisturbed = server, case, prepare(folder), undisturbed
        self.chance, self.tally, self.first = chance, tally, first

    def hit(self, most: int) -> int:
        """Start the run until it is complete or this many processes were killed; returns their number."""
        killed = 0
        while killed < most:
            number, ended = self._start_and_hit(most - killed)
            killed += number
            for path in ledgers(self.folder):
                assert not (faults := History.of(path).faults), f"{path}: {faults}"
            if ended.status == 0:
                return killed
        return killed

    def finish(self) -> None:
        """See the run through, and check everything that it left.

        Raises:
            AssertionError: something was lost, doubled or changed.
        """
        ended = self._ended(self.server.start(self.folder, self._arguments()))
        assert ended.status == 0, f"without a kill it ended with {ended.status}\n{ended.output[-4000:]}"
        self.tally.complete += 1
        check(self.case, self.folder, self.undisturbed.folder, self.tally)
        if self.case.replayed:
            again = self.folder.with_name(f"{self.folder.name}_again")
            run_undisturbed(self.server, self.case, again, f"{FOLLOW}={self.folder / 'run'}")
            assert_same_weights(self.case, self.folder, again)
            self.tally.equal += 1
            shutil.rmtree(again)

    def _ended(self, run: Run) -> Ended:
        self.tally.starts += 1
        ended = run.wait()
        self.tally.resumed += "trainer.resume_mode: continues from" in ended.output
        return ended

    def _arguments(self) -> list[str]:
        """Of the next start; a record is there once a start before has taken a decision."""
        has_record = self.case.replayed and any(path.stat().st_size for path in (self.folder / "run").glob(RECORDS))
        return [*self.case.arguments(), *([f"{FOLLOW}=run"] if has_record else [])]

    def _start_and_hit(self, most: int) -> tuple[int, Ended]:
        (self.folder / "hits").unlink(missing_ok=True)
        begun, moment, server = time.monotonic(), "", self.server
        if self.first is not None:
            server, moment, self.first = self.first, "published", None
        elif self.chance.random() < (0.3 if self.case.on_ray else 0.5):
            moment = self.chance.choice(sorted(self.case.points))
        fault = f"{moment}:{self.chance.randint(1, self.case.points[moment])}:KILL" if moment else ""
        run = server.start(self.folder, self._arguments(), fault)
        killed = 0 if fault else self._at_instants(run, most)
        ended = self._ended(run)
        if fault and (self.folder / "hits").exists():
            for line in (self.folder / "hits").read_text().splitlines():
                pid = int(line.split()[0])
                role = "controller" if pid == run.pid else _role_of_point(moment)
                self.tally.kills[role, moment] += 1
                killed += 1
        self._judge(ended, killed, fault, time.monotonic() - begun)
        return killed, ended

    def _at_instants(self, run: Run, most: int) -> int:
        """Kill processes of a run until one kill ends it, or this many; returns how many were killed."""
        killed, moment = 0, "random"
        if self.chance.random() < 0.2:
            moment = "start"
        else:
            self._until_it_holds_its_folder(run)
        self._pause(run)
        victims = dict(self._victims(run))
        while victims and killed < most:
            others = sorted({*victims.values()} - {"controller"})
            role = self.chance.choice(others) if others and self.chance.random() < 0.8 else "controller"
            pid = self.chance.choice(sorted(pid for pid, its in victims.items() if its == role))
            if _kill(pid):
                self.tally.kills[role, moment] += 1
                killed += 1
            if role == "controller":
                break
            self._pause(run)  # a run that bears the loss is hit again
            victims = dict(self._victims(run))
        return killed

    def _pause(self, run: Run) -> None:
        """Until a random instant within a quarter of the seconds of an undisturbed run, or the run's end."""
        run.ends_within(self.chance.uniform(0, self.undisturbed.seconds / 4))

    def _victims(self, run: Run) -> Iterator[tuple[int, str]]:
        if run.lives():
            yield run.pid, "controller"
        for pid, words in processes_of(self.folder).items():
            yield from ((pid, role) for part, role in ROLES.items() if part in words)

    def _until_it_holds_its_folder(self, run: Run) -> None:
        lock = self.folder / "run/.lock"

        def held() -> bool:
            return lock.exists() and f'"pid": {run.pid},' in lock.read_text()

        wait_until(lambda: held() or not run.lives(), lambda: f"{lock} was not taken")

    def _judge(self, ended: Ended, killed: int, fault: str, seconds: float) -> None:
        """A run ends because it is complete, or because of the kill, and in the latter case says what was lost."""
        errors = [line for line in ended.output.splitlines() if line.startswith("error:")]
        how = {0: "complete", -signal.SIGKILL: "the controller was killed"}.get(ended.status, f"status {ended.status}")
        self.tally.ends[f"{how}: {_kind(errors[0])}" if errors else how] += 1
        print(f"{self.folder.name} {fault or 'instant'}: {killed} killed, {how}, {seconds:.1f} s", flush=True)
        if ended.status not in (0, -signal.SIGKILL):
            assert killed and errors, f"{fault}: it ended with {ended.status}\n{ended.output[-4000:]}"
        assert_no_process_left(self.folder, besides=("Agent",))


def check(case: Case, folder: Path, undisturbed: Path, tally: Tally) -> None:
    """Count what a complete run has lost, doubled or changed.

    Raises:
        AssertionError: there is something.
    """
    history = History.of(newest(ledgers(folder)))
    assert not history.faults, history.faults
    dumped = [read_json(line) for text in samples(folder).values() for line in text.split("\n") if line]
    of_ledger = Counter((one.uid, one.sample) for one in history.samples if one.stage == "trained")
    lost, doubled = (0 if case.leaves else len(history.open)), 0
    for keys in (of_ledger, Counter((row["uid"], row["sample"]) for row in dumped)):
        lost, doubled = lost + max(0, case.trained - len(keys)), doubled + keys.total() - len(keys)
    if not case.leaves:
        each, by_prompt = case.trained // PROMPTS, Counter(row["input"] for row in dumped)
        lost += sum(max(0, each - count) for count in by_prompt.values()) + each * (PROMPTS - len(by_prompt))
        doubled += sum(max(0, count - each) for count in by_prompt.values())
    tally.lost, tally.doubled = tally.lost + lost, tally.doubled + doubled
    assert lost == 0 and doubled == 0, f"{folder}: lost {lost}, doubled {doubled}"
    dumped_keys = {(row["uid"], row["sample"]) for row in dumped}
    assert of_ledger.keys() == dumped_keys and len(dumped_keys) == case.trained, (len(of_ledger), len(dumped_keys))
    assert len(samples(folder)) == case.steps
    assert [row["step"] for row in metrics(folder)] == list(range(1, case.steps + 1))
    assert {one.step for one in read_spans(folder / "run")} >= set(range(1, case.steps + 1))
    if case.same_bits:
        assert_same_weights(case, folder, undisturbed)
        tally.equal += 1
    else:
        ours, theirs = accuracy(folder), accuracy(undisturbed)
        assert abs(ours - theirs) < 0.1, (ours, theirs)


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


def _kind(line: str) -> str:
    """The error without its numbers, its process and its node, which are in brackets: equal causes count as one."""
    return re.sub(r"\d", "#", re.sub(r" \([^)]*\)", "", line))[:150]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def run_undisturbed(server: Server, case: Case, folder: Path, *more: str) -> Undisturbed:
    """The case without a kill, in one process, which is faster."""
    prepare(folder)
    words = [word for word in case.arguments() if word not in ON_RAY]
    begun = time.monotonic()
    ended = server.start(folder, [*words, "trainer.runtime=local", *more]).wait()
    assert ended.status == 0, ended.output[-4000:]
    return Undisturbed(folder, time.monotonic() - begun)


def disturb(
    server: Server, name: str, case: Case, kills: int, place: Path, seed: int, tally: Tally, first: Server | None = None
) -> None:
    """Use up the kills of a case, with as many runs as that takes."""
    undisturbed, left, number = run_undisturbed(server, case, place / f"{name}_undisturbed"), kills, 0
    chance = random.Random(f"{seed} {name}")
    while left > 0:
        number += 1
        run = Disturbed(server, case, place / f"{name}_{number}", undisturbed, chance, tally, first)
        left -= run.hit(left)
        run.finish()
        shutil.rmtree(run.folder)


def server_of(revision: str, place: Path) -> Server:
    """A server of runs with the code of a commit, which is written into a folder."""
    archive, root = place / "first.tar", place / "first"
    subprocess.run(["git", "archive", "-o", str(archive), revision], cwd=ROOT, check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(root, filter="data")
    return Server(root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true", help="the cases on Ray, whose workers are processes")
    parser.add_argument("--cases", default="", help=f"of {', '.join(CASES)}, or of {', '.join(RAY_CASES)}")
    parser.add_argument("--first-commit", default="", metavar="REV", help="whose code begins each run")
    parser.add_argument("--folder", type=Path, default=None, help="for the runs; a new one by default")
    options = parser.parse_args(argv)
    usual = RAY_CASES if options.ray else CASES
    names = options.cases.split(",") if options.cases else [*usual]
    cases = {name: case for name, case in (CASES | RAY_CASES).items() if name in names}
    if unknown := {*names} - {*cases}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    place = (options.folder or Path(tempfile.mkdtemp(prefix="killed"))).absolute()
    place.mkdir(parents=True, exist_ok=True)
    servers = [Server(), *([server_of(options.first_commit, place)] if options.first_commit else [])]
    tallies, begun = {name: Tally() for name in cases}, time.monotonic()
    try:
        for position, (name, case) in enumerate(cases.items()):
            kills = (options.kills + len(cases) - 1 - position) // len(cases)
            disturb(servers[0], name, case, kills, place, options.seed, tallies[name], *servers[1:])
            print(f"{HEAD}\n{row(name, tallies[name], case)}", flush=True)  # so a long run that is cut off has rows
    except AssertionError as error:
        print(f"FAULT: {error}\nThe folder is {place}", file=sys.stderr)
        return 1
    finally:
        for server in servers:
            server.close()
        print(table(tallies, cases, time.monotonic() - begun))
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
