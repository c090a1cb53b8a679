"""An OpenAI-compatible endpoint over the sampler that is being trained: an existing agent becomes a rollout.

`protocol` reads OpenAI's JSON and `replies` writes it, `http` is the door (token, limits, streams), `record` keeps what
was sampled, `prompts` turns messages into tokens that extend what is recorded, `conversation` and `endpoint` join
them, `agent` runs a user's function and `loop` makes a row of it.
"""
