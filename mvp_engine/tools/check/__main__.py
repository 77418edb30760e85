"""One rank of a check, for torchrun."""

import sys

from mvp_engine.tools.check import main

sys.exit(main())
