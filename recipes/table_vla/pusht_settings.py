"""The config keys of `pusht.py`."""

from .settings import TableConfig


class PushTConfig(TableConfig):
    pass
