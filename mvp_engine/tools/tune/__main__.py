"""Entry point of one trial: it starts the ranks, which write what they measure into `--folder`."""

from __future__ import annotations

import sys

from mvp_engine.tools.launcher import run_module
from mvp_engine.tools.nodes import Nodes

if __name__ == "__main__":
    nproc, *arguments = sys.argv[1:]
    sys.exit(run_module("mvp_engine.tools.tune.rank", Nodes(int(nproc)), arguments))
