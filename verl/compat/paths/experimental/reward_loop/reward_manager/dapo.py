"""The manager `dapo` for one row, under upstream's newer path."""

from verl.compat.forms.row_managers import DAPORowManager as DAPORewardManager
