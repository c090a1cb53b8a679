"""Megatron's helpers under upstream's path; the engine is `verl.engines.megatron`."""
