"""`mvp_engine.launch` on a slow disk: every flush of a file takes `MVP_FSYNC_SECONDS` longer."""

import os
import sys
import time

from mvp_engine import launch

_fsync = os.fsync


def _slow_fsync(descriptor):
    time.sleep(float(os.environ["MVP_FSYNC_SECONDS"]))
    _fsync(descriptor)


os.fsync = _slow_fsync
sys.exit(launch.main())
