"""Upstream's folder of fully asynchronous training."""
