"""The algorithms under the path and the names that users' estimators, losses and recipes import from upstream."""

from verl.compat.forms.core_algos import *
