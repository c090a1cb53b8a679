"""The manager `naive` for one row, under upstream's newer path."""

from verl.compat.forms.row_managers import NaiveRowManager as NaiveRewardManager
