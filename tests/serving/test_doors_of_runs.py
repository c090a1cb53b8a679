"""What a run of each kind opens, looked at while it trains, and held against the page that says so."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.harness import open_files
from tests.harness.forked_runs import Server, grpo, prepare
from tests.harness.ranks import TIMEOUT, run_cells
from tests.harness.sandboxes import HERE
from tests.harness.training_programs import PROGRAMS, sft_arguments
from tests.megatron.cells import TENSOR
from tests.megatron.supervised_cells import cut, trained

pytestmark = pytest.mark.slow

SCORER = """
from functools import cache

from tests.harness.open_files import write_down
from verl.sandbox import Pool, Session


@cache
def session():
    return Session(Pool(1, **{sandbox}))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert session().run("1 + 1").stdout == "2\\n"
    write_down{to}
    return len(set(solution_str)) / 10
"""
AT_A_STEP = "from tests.harness.open_files import at_every_step\nat_every_step{to}\n"
LOOPBACK, EVERYWHERE = {"127.0.0.1", "::1"}, {"0.0.0.0", "::"}
COLUMNS = ("loopback", "every interface", "its address", "names", "sockets")
TORCHS_OWN = "torchinductor_* 0755"
"""A folder that torch makes once one of its modules is imported, sooner or later in a run."""
PRIVATE = {"config.yaml", "journal.jsonl"}
"""Records of a run that nobody else may read."""
ONE_STEP = "trainer.total_training_steps=1"


@dataclass(frozen=True)
class Run:
    """A place for one run: its folder, and its folder for temporary files, whose path is short."""

    folder: Path
    temporary: Path

    @property
    def to(self) -> tuple[str, int]:
        """Where its processes write down what they see, and whose child the first of them is."""
        return str(self.folder / "looks"), os.getpid()


def controlled(run: Run, *changes: str) -> None:
    """Two steps of PPO. The user's reward function looks, while a program stands still in the sandbox."""
    prepare(run.folder)
    (run.folder / "scorer.py").write_text(SCORER.format(sandbox=HERE, to=run.to))
    server = Server(TMPDIR=str(run.temporary))
    ended = server.start(run.folder, [*grpo(2), *changes]).wait()
    server.close()
    assert ended.status == 0, ended.output[-3000:]


def on_ray(run: Run) -> None:
    controlled(run, "trainer.runtime=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")


def by_torchrun(run: Run) -> None:
    """A step of supervised training. Each rank looks, in the middle of it."""
    PROGRAMS["sft"].prepare(run.folder)
    (run.folder / "at_a_step.py").write_text(AT_A_STEP.format(to=run.to))
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(run.folder)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    program = ["verl.trainer.sft_trainer", *sft_arguments(run.folder, run.folder / "run"), ONE_STEP]
    done = subprocess.run(
        [*command, *program, "model.external_lib=at_a_step", "trainer.device=cpu"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(run.temporary)},
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@dataclass(frozen=True)
class MegatronCell:
    """The same step on Megatron-Core's ranks, as a cell of a group."""

    run: Run

    @property
    def __name__(self) -> str:
        return "megatron"

    def __call__(self, ranks, folder: Path) -> None:
        tempfile.tempdir = str(self.run.temporary)
        open_files.at_every_step(self.run.to[0], os.getppid())
        root = self.run.folder / "run"
        trained(ranks, "sft_trainer", root, [*sft_arguments(self.run.folder, root), *cut(TENSOR), ONE_STEP])


def on_megatron(run: Run) -> None:
    PROGRAMS["sft"].prepare(run.folder)
    run_cells(2, [MegatronCell(run)], run.folder / "notes")


KINDS = {
    "`main_ppo` in one process": controlled,
    "`main_ppo` on Ray, two workers": on_ray,
    "`torchrun` with two ranks": by_torchrun,
    "Megatron-Core, two ranks": on_megatron,
}


@dataclass(frozen=True)
class Opened:
    """A kind of run, and what one of them opened."""

    kind: str
    run: Run
    seen: open_files.Seen


@pytest.fixture(scope="module")
def all_opened(own_ray_folder, tmp_path_factory) -> dict[str, Opened]:
    """All kinds, at the same time."""
    runs = {kind: Run(tmp_path_factory.mktemp("run"), Path(tempfile.mkdtemp(prefix="v", dir="/tmp"))) for kind in KINDS}
    before, umask = set(open_files.names()), os.umask(0o022)
    try:
        for run in runs.values():
            (run.folder / "looks").mkdir()
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
            patch.delenv("TORCHINDUCTOR_CACHE_DIR", False)  # torch sets it in a process that has made the folder
            ends = [threads.submit(KINDS[kind], run) for kind, run in runs.items()]
        for end in ends:
            end.result()
    finally:
        os.umask(umask)
        for run in runs.values():
            shutil.rmtree(run.temporary)
    found = {kind: Opened(kind, run, open_files.read(run.folder / "looks")) for kind, run in runs.items()}
    for one in found.values():
        one.seen.names = {path: facts for path, facts in one.seen.names.items() if path not in before}
    return found


@pytest.fixture(params=KINDS)
def opened(request, all_opened) -> Opened:
    return all_opened[request.param]


def private(folder: str) -> str:
    """The folder of this user's alone in which Ray's files lie; nobody else gets further, whatever their modes."""
    own = f"{folder}/verl-{os.geteuid()}"
    assert not Path(own).exists() or with_mode("folder", open_files.facts(own)) == "folder 0700"
    return own


def with_mode(name: str | Path, facts: list[int]) -> str:
    """The name without what differs from run to run, and its mode."""
    mode, owner = facts
    assert owner == os.geteuid() and not stat.S_ISLNK(mode), name
    name = re.sub(r"((?:sandbox-|session_|torchelastic_|torchinductor_))[^/]+", r"\1*", str(name))
    return f"{name} {stat.S_IMODE(mode):04o}"


def on_the_page(page: str, kind: str) -> dict[str, set[str]]:
    """The row of this kind of run, by column."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {kind} |")]
    cells = [cell.replace("`", "").strip() for cell in row.removeprefix(f"| {kind} |").strip(" |").split(" | ")]
    found = {column: set(cell.split(", ")) for column, cell in zip(COLUMNS, cells, strict=True)}
    return {column: cell - {"none"} for column, cell in found.items()}


def test_a_run_opens_what_the_page_says_and_nothing_else(opened, own_ray_folder, project_root):
    page, seen = (project_root / "docs/concepts/security.md").read_text(), opened.seen
    expected = on_the_page(page, opened.kind)
    own = {entry.address for interface in psutil.net_if_addrs().values() for entry in interface} - LOOPBACK
    places = dict(zip(COLUMNS, (LOOPBACK, EVERYWHERE, own), strict=False))
    assert {address for _, address in seen.listening} <= set().union(*places.values())
    found = {place: {who for who, where in seen.listening if where in addresses} for place, addresses in places.items()}
    if not found["its address"]:  # a machine without a network has no address but loopback
        found["its address"] = found["loopback"] & expected["its address"]
        found["loopback"] -= found["its address"]
    found["names"] = {with_mode(Path(path).name, facts) for path, facts in seen.names.items()} - {TORCHS_OWN}
    sockets = seen.sockets | {folder: open_files.facts(folder) for folder in map(os.path.dirname, seen.sockets)}
    own_folder = private(own_ray_folder)
    found["sockets"] = {with_mode(path.replace(own_folder, "$TMPDIR/verl-uid"), mode) for path, mode in sockets.items()}
    assert found == expected and TORCHS_OWN in page.replace("`", "")
    assert not seen.closed, "all that a run starts can be looked into"
    least = 4 if "main_ppo" in opened.kind else 2
    assert len(seen.processes) >= least, "controller, reward worker, sandbox with its program; or two ranks"


def test_a_run_writes_into_its_own_folder_and_on_ray_into_that_of_the_cluster(opened, own_ray_folder):
    places = (f"{opened.run.folder}/", *([f"{private(own_ray_folder)}/ray/session_"] if "Ray" in opened.kind else []))
    for path, facts in opened.seen.writes.items():
        mode = "0600" if Path(path).name in PRIVATE else "0644"
        assert path.startswith(places) and with_mode(path, facts).endswith(f" {mode}"), path
