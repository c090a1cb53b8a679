"""A program that holds an engine of two processes, begins to send it weights, and is killed meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading

import psutil

from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights


def main(folder: str) -> None:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    sampler = VLLMSampler({"model": folder, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, **two})
    children = psutil.Process().children(recursive=True)
    pids = [child.pid for child in children if "VLLM::Worker" in " ".join(child.cmdline())]
    weights = list(HFSampler(folder, device="cpu").model.state_dict().items())

    def unending():
        yield next(iter(chunk_weights(weights, 1 << 12, 1)))
        print("workers", *pids, flush=True)
        threading.Event().wait()

    asyncio.run(sampler.update_weights(unending(), 1))


if __name__ == "__main__":
    main(sys.argv[1])
