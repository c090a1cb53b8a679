"""Upstream import paths that users' code names; what stands behind them lives elsewhere."""
