"""The pages in reStructuredText: their links lead somewhere, and the example configuration is one."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.sanity.source_tree import ROOT
from verl.config.loading.configuration import read_config

PAGES = ("docs/index.rst", "docs/examples/config.rst")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"`[^`<]+<([^>]+)>`_", text)
    assert targets and all(((ROOT / page).parent / target).is_file() for target in targets)


def test_the_blocks_of_the_example_are_one_file_that_is_read_as_it_says(tmp_path):
    text = (ROOT / PAGES[1]).read_text(encoding="utf-8")
    blocks = re.findall(r"code-block:: yaml\n\n((?:   .*\n|\n)+)", text)
    assert len(blocks) == 5
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(textwrap.dedent(block))
    (tmp_path / "grpo.yaml").write_text(f"defaults: [ppo_trainer, {', '.join(f'{n}' for n in map(repr, '01234'))}]\n")
    config = read_config("ppo_trainer", ["-cp", str(tmp_path), "-cn", "grpo", "trainer.total_epochs=3"])
    algorithm = config.algorithm
    assert (algorithm.adv_estimator, algorithm.rollout_is, algorithm.rollout_is_threshold) == ("grpo", True, 2.0)
    assert config.actor_rollout_ref.rollout.calculate_log_probs and config.trainer.total_epochs == 3
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6 and config.data.max_response_length == 1024
