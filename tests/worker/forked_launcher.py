"""The spawn launcher with processes of the tests' fork server, which have done the imports."""

import os

from forked import fork_context

from mvp_engine.process import watchdog
from mvp_engine.worker.launchers import SpawnLauncher, serve


class ForkedLauncher(SpawnLauncher):
    def _process(self, place, connection):
        return fork_context().Process(target=_serve, args=(place, connection))


def _serve(place, connection):
    watchdog.PARENT = os.getppid()  # the fork server, not the process that started it
    serve(place, connection)
