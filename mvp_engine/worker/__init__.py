"""Worker groups: model engines in other processes, driven by one controller; one API for local, spawn and Ray."""

from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.launchers import WorkerDied, WorkerError, WorkerUserError
from mvp_engine.worker.worker import Loss, UpdateNumbers, Worker, WorkerSpec

__all__ = [
    "Loss",
    "UpdateNumbers",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerUserError",
]
