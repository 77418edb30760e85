"""One rank of a check, for torchrun."""

import sys

from mvp_engine.check import main

sys.exit(main())
