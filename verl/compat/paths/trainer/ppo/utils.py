"""Upstream's import path of the roles and of what a configuration needs."""

from verl.single_controller.base import Role, Worker
from verl.trainer.build import need_critic, need_reference_policy, need_reward_model

WorkerType = type[Worker]
