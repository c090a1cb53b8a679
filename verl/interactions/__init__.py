"""Simulated users: what answers the model between its turns, other than a tool."""

from verl.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
