"""The torchrun form: no controller process, every rank runs the controller's loop on its share of each batch."""

from verl.single_controller.spmd.context import Peers, Spmd

__all__ = ["Peers", "Spmd"]
