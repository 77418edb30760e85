"""The former name of the engine of recipes/table_vla, for configs and engines of 0.2. It goes with 0.4."""

import warnings
from typing import Any

from mvp_engine.imports import import_file, shipped_folder

warnings.warn(
    "mvp_engine.kit.actions.ActionEngine is the engine of the recipe table_vla since 0.3: write `engine: table_vla` in "
    "a config, and copy recipes/table_vla for an engine of your own",
    FutureWarning,
    stacklevel=2,
)
_table_vla: Any = import_file(shipped_folder("recipes") / "table_vla" / "engine.py")


class ActionEngine(_table_vla.TableEngine):
    pass
