"""A loss on pairs and settings of the user's own, in files of his own: what recipes have, these have."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.harness.programs import metrics, python
from tests.harness.runs import COMMON, prepare, train
from verl.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODE = f"{A}.policy_loss.loss_mode=my_pairs:hinge"


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch, project_root: Path):
    """The working folder, with the code of the documentation's page."""
    monkeypatch.syspath_prepend(workplace)
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    page = (project_root / "docs/howto/extending.md").read_text(encoding="utf-8")
    for name in ("my_pairs", "my_bonus"):
        code = page.partition(f"`{name}.py`:")[2].partition("```python\n")[2].partition("```")[0]
        Path(f"{name}.py").write_text(code)
    yield workplace
    for name in ("my_pairs", "my_bonus"):
        sys.modules.pop(name, None)


def test_a_run_makes_the_pairs_and_keeps_them_whole(here):
    """On the reference every gain is 0, so that the loss of the first pass is 1 for each pair."""
    seen = train(MODE, f"{R}.n=3", f"{A}.ppo_micro_batch_size_per_gpu=2",
                 f"{A}.optim.lr=1e-2", "trainer.total_training_steps=2",
                 "trainer.ref_update_freq=2")  # fmt: skip
    first, batch = seen.metrics[0], seen.batches[0]
    assert first["training/pairs"] + 4 * first["training/tied_prompts"] == 4 and first["training/pairs"] > 0
    assert "ref_log_prob" in batch.tensors.keys() and "old_log_probs" not in batch.tensors.keys()
    assert first["actor/grad_norm"] > 0
    assert first["actor/pg_loss"] == pytest.approx(1) != seen.metrics[1]["actor/pg_loss"]


def test_what_pairs_cannot_do_is_refused(here):
    for word, says in ((f"{R}.n=1", "several answers"), (f"{A}.ppo_micro_batch_size_per_gpu=1", "two rows of a pair"),
                       ("algorithm.use_pf_ppo=true", "no pairs")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            train(MODE, f"{R}.n=2", "algorithm.adv_estimator=reinforce_plus_plus", word)


def test_an_estimator_reads_the_setting_that_its_file_brings(here):
    """Scores below 1 and a bonus of 3: every advantage lies between 3 and 4."""
    seen = train("algorithm.adv_estimator=my_bonus:flat", "algorithm.bonus=3", f"{R}.n=2")
    advantages = seen.batches[0].tensors["advantages"]
    of_tokens = advantages[seen.batches[0].tensors["response_mask"].bool()]
    assert of_tokens.min() >= 3 and of_tokens.max() < 4
    assert seen.trainer.config.algorithm.bonus == 3


RECIPE = '''"""Answers against the others to their prompt, less a price for their length."""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

import torch
from verl.config import ConfigNode, Recipe, setting
from verl.registry import EstimatorFacts
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.schedules import SYNC


@dataclass(frozen=True)
class Price(ConfigNode):
    """What length costs."""

    token_price: float = setting(0.25, "price of a token")


RECIPE = Recipe("priced", settings={"algorithm": Price})
FACTS = {"priced": EstimatorFacts(groups=True)}


def priced(*, token_level_rewards, response_mask, index, config, **_):
    worth = token_level_rewards.sum(-1) - config.token_price * response_mask.sum(-1)
    groups = defaultdict(list)
    for row, uid in enumerate(index):
        groups[uid].append(row)
    gain = torch.zeros_like(worth)
    for rows in groups.values():
        gain[rows] = worth[rows] - worth[rows].mean()
    advantages = gain[:, None] * response_mask
    return advantages, advantages


def pushed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), {"actor/pushed": 1.0}


def measure(batch, roles, ctx):
    ctx.metrics.add("priced/tokens", batch.batch["response_mask"].sum(-1).float().mean().item())


MEASURED = dataclasses.replace(SYNC, stages=(measure,))
'''
WATCHED = """
import json, sys
written = set()

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & 3:  # for writing
        written.add(arguments[0])

sys.addaudithook(watch)
from verl.trainer.main_ppo import main
status = main(sys.argv[1:])
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"status": status, "written": sorted(written), "loaded": loaded}))
"""


@pytest.mark.slow
def test_a_recipe_from_the_page_alone_touches_nothing_but_its_folder(workplace: Path, project_root: Path):
    """Estimator, loss, setting, stage and schedule of a folder outside: all that it imports is on the page."""
    page = (project_root / "docs/howto/extending.md").read_text(encoding="utf-8")
    folder = Path("priced")
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "core.py").write_text(RECIPE)
    imported = [(node.module, name.name) for node in ast.walk(ast.parse(RECIPE)) if isinstance(node, ast.ImportFrom)
                for name in node.names if (node.module or "").startswith("verl")]  # fmt: skip
    assert len(imported) == 6 and [pair for pair in imported if not all(part in page for part in pair)] == []
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    words = ["algorithm.adv_estimator=priced.core:priced", f"{A}.policy_loss.loss_mode=priced.core:pushed",
             "trainer.v1.trainer_mode=priced.core:MEASURED", "algorithm.token_price=0.5",
             "trainer.total_training_steps=2", "trainer.project_name=own", "trainer.experiment_name=priced",
             "trainer.default_local_dir=run"]  # fmt: skip
    temporary = workplace / "temporary"
    temporary.mkdir()
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary)}
    done = python("-c", WATCHED, *COMMON[1:], *words, cwd=workplace, **variables)
    report = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert report["status"] == 0 and "recipe" not in report["loaded"] and "priced" in report["loaded"]
    outside = [
        path for path in report["written"] if not (workplace / path).resolve().is_relative_to(workplace.resolve())
    ]
    assert [path for path in outside if not path.startswith(("/dev/", "/proc/"))] == []
    assert [path for path in outside if path.startswith(str(project_root))] == []
    steps = metrics(workplace, "own", "priced")
    assert [step["actor/pushed"] for step in steps] == [1.0, 1.0]
    assert all(step["priced/tokens"] == pytest.approx(step["response_length/mean"]) for step in steps)
