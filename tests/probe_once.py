"""The packing probe of an engine's start, once for each layout in a test file instead of once for each engine.

The probe (`mvp_engine.hf.model.preflight`) is a third of the CPU time of a test that builds an engine on ranks and
compares its gradients with those of one rank, a comparison that would find more than the probe does. Tests of the
probe itself are in the files of `ALWAYS`.
"""

import os
import sys
from pathlib import Path

ALWAYS = (
    "test_preflight",
    "test_preflight_media",
    "test_padded_rows",
    "test_padded_edge",
    "test_mixers",
)
FILE = [""]  # the test file that is running, in a rank process
_PASSED = set()


def current_file():
    """The name of the test file that this process runs."""
    return Path(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]).stem


def forget():
    """Let the next engine of this process run its probe."""
    _PASSED.clear()


def install(on_ranks=False):
    """Replace the probe by one that remembers what has passed, as soon as it is imported."""
    module = sys.modules.get("mvp_engine.hf.model.adapter")
    if module is None or hasattr(module.HFAdapter.preflight, "always"):
        return
    always = module.HFAdapter.preflight

    def preflight(self, layout, exact):
        file = FILE[0] if on_ranks else current_file()
        sizes = [
            getattr(layout, name)
            for name in ("replicate", "shard", "ulysses", "context", "tensor", "pipeline")
        ]
        # On ranks the first family of a file is probed on each layout; in one process each config is.
        config = None if on_ranks else self.model.hf.config.to_json_string()
        key = (file, type(self.model).__name__, *sizes, exact, config)
        if key in _PASSED and file not in ALWAYS:
            return
        always(self, layout, exact)
        if not self.model.padded_rows:
            _PASSED.add(key)

    preflight.always = always
    module.HFAdapter.preflight = preflight
