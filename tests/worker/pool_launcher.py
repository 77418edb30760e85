"""Worker groups on the warm ranks of the tests, which need no imports."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

from mvp_engine.worker.launchers import WorkerError

HOST = None  # of this process, if it is a rank


class PoolRank:
    def __init__(self, launcher):
        self.launcher = launcher

    def submit(self, name, method, *args, **kwargs):
        future = Future()
        self.launcher.submitted.append((future, (name, method, args, kwargs)))
        if len(self.launcher.submitted) == self.launcher.pool.size:
            self.launcher.run()
        return future

    def kill(self):
        pass


class PoolLauncher:
    def __init__(self, pool):
        self.pool = pool
        self.submitted: list[Any] = []

    def start(self, ranks, device, timeout):
        assert ranks == self.pool.size
        return [PoolRank(self) for _ in range(ranks)]

    def run(self):
        submitted = self.submitted
        self.submitted = []
        results = self.pool.run(_call, [call for _, call in submitted])
        for (future, _), (error, result) in zip(submitted, results, strict=True):
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def close(self):
        self.pool.run(_end)


def _call(calls):
    from mvp_engine.distributed import World
    from mvp_engine.worker.launchers import Place, WorkerHost

    global HOST
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if HOST is None:
        HOST = WorkerHost(Place(rank, size, "cpu"))
        HOST.world = World.join("cpu")
    name, method, args, kwargs = calls[rank]
    try:
        return None, HOST.call(name, method, *args, **kwargs)
    except WorkerError as error:
        return error, None


def _end():
    global HOST
    if HOST is not None:
        HOST.workers.clear()
        HOST.world.close()
    HOST = None
