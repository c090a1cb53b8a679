"""Sampling by requests to an HTTP server: vLLM's, SGLang's, TGI's, or any that speaks OpenAI's completions."""
