"""Samplers behind one async contract; a backend is named in the registry and imported only when a run asks for it."""

from verl.rollout.base import Completion, Request, Sampler, SamplingParams, check_request

__all__ = ["Completion", "Request", "Sampler", "SamplingParams", "check_request"]
