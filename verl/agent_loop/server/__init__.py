"""The endpoint over the sampler that is being trained: an existing agent becomes a rollout.

`protocol` reads OpenAI's chat completions and `replies` writes them; `forms` are what clients speak, Anthropic's
messages and OpenAI's responses each in a file. `record` keeps what was sampled, `prompts` turns messages into tokens
that extend what is recorded, `conversation` and `endpoint` join them, `agent` runs a user's function and `loop` makes a
row of it.
"""
