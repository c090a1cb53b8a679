"""The manager `gdpo` for one row, under upstream's newer path."""

from verl.compat.forms.row_managers import GDPORowManager as GDPORewardManager
