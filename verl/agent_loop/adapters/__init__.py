"""Environments of other libraries as rollouts: ``verifiers`` through the endpoint, OpenEnv and Harbor as `envs`."""
