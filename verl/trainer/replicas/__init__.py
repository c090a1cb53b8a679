"""Replicas that are replaced, join and leave while a run goes on."""
