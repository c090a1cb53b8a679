"""The actor over a module that the caller has built, under upstream's path."""

from verl.compat.forms.actors import DataParallelPPOActor
