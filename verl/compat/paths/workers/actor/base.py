"""The actor's update over any engine, under upstream's path."""

from verl.workers.by_hand import BasePPOActor
