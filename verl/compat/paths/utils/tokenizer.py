"""Tokenizer loading under the path that users' code imports; it lives in `verl.data.tokenizer`."""

from verl.data.tokenizer import eos_token_ids, hf_processor, hf_tokenizer, normalize_token_ids
