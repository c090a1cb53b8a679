"""The actor's update over any engine, under upstream's path."""

from verl.compat.forms.actors import BasePPOActor
