"""A recipe as upstream's documentation shows one: its own trainer class, its own Ray task, Hydra for the settings."""

import json
import os
import socket

import hydra
import ray
from omegaconf import OmegaConf

from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.device import is_cuda_available
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class CountingTrainer(RayPPOTrainer):
    """Adds its own number to what is validated."""

    def _validate(self):
        metrics = super()._validate()
        self.validations = getattr(self, "validations", 0) + 1
        metrics.update(reduce_metrics({"val-aux/mine/validations": [self.validations]}))
        return metrics


@ray.remote(num_cpus=1)
class TaskRunner:
    def run(self, config):
        print(f"TaskRunner hostname: {socket.gethostname()}, PID: {os.getpid()}")
        OmegaConf.resolve(config)
        if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
            raise NotImplementedError(config.actor_rollout_ref.actor.strategy)
        local_path = copy_to_local(config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.use_shm)
        tokenizer = hf_tokenizer(local_path, trust_remote_code=False)
        processor = hf_processor(local_path, use_fast=True)
        pool = "global_pool"
        role_worker_mapping = {
            Role.ActorRollout: ray.remote(ActorRolloutRefWorker),
            Role.RefPolicy: ray.remote(ActorRolloutRefWorker),
        }
        manager = ResourcePoolManager(
            resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping=dict.fromkeys(role_worker_mapping, pool),
        )
        trainer = CountingTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=manager,
            ray_worker_group_cls=RayWorkerGroup,
            device_name=None if is_cuda_available else "cpu",
        )
        trainer.init_workers()
        trainer.fit()
        return trainer.validations


@hydra.main(config_path="config", config_name="mine", version_base=None)
def main(config):
    if not ray.is_initialized():
        arguments = OmegaConf.merge({"runtime_env": get_ppo_ray_runtime_env()}, config.ray_kwargs.ray_init)
        ray.init(**OmegaConf.to_container(arguments))
    validations = ray.get(TaskRunner.remote().run.remote(config))
    print(json.dumps({"validations": validations}))


if __name__ == "__main__":
    main()
