"""From the training layout to the sampling layout on the same ranks: plan, price, execution (HybridFlow, section 5)."""

from verl.weight_sync.resharding.execute import Resharder
from verl.weight_sync.resharding.layout import Layout, zero_redundancy
from verl.weight_sync.resharding.model import ModelWeights, Weight, decoder
from verl.weight_sync.resharding.plan import Entry, Plan, Price, closed_form, make_plan

__all__ = [
    "Entry",
    "Layout",
    "ModelWeights",
    "Plan",
    "Price",
    "Resharder",
    "Weight",
    "closed_form",
    "decoder",
    "make_plan",
    "zero_redundancy",
]
