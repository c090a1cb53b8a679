"""The trainer of the recipe under the name that scripts import: the library's own, which filters groups itself."""

from __future__ import annotations

from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class RayDAPOTrainer(RayPPOTrainer):
    """`RayPPOTrainer`; dynamic sampling is ``algorithm.filter_groups`` of any run."""
