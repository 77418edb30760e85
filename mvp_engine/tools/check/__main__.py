"""Entry point of one rank of a check under torchrun."""

import sys

from mvp_engine.tools.check import main

sys.exit(main())
