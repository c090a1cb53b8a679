"""Sampling with SGLang, over the HTTP interface of its server."""
