"""Rank processes that stay up between tests, forked from a server that has done the imports."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from forked import fork_context


class RankPool:
    """`size` processes that act as the ranks of a job: `pool.run(f, *args)` calls `f(*args)` on all of them at once
    and returns the results in rank order.

    Each call sets torchrun's environment variables with a fresh port, so `f` may join and leave a process group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = fork_context()
        self.pipes = []
        self.processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, theirs), daemon=False)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        port = free_port()
        for pipe in self.pipes:
            pipe.send((function, args, port))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                for process in self.processes:  # each rank prints its stack
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(1.0)
                self._restart(rank)
                errors = "\n".join(error for error, _ in answers if error)
                raise TimeoutError(f"rank {rank} of {self.size} returned nothing in {timeout} s\n{errors}")
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))  # `recv` would open a socket for each tensor
            except EOFError:
                code = self._restart(rank)
                raise EOFError(f"rank {rank} of {self.size} died with exit code {code}") from None
        for rank, (error, _) in enumerate(answers):
            if error:
                raise AssertionError(f"rank {rank} failed:\n{error}")
        return [value for _, value in answers]

    def _restart(self, rank: int) -> int | None:
        """New processes, for the tests that follow; returns the exit code of a rank."""
        self.processes[rank].join(1.0)
        code = self.processes[rank].exitcode
        self.close()
        self._start()
        return code

    def launch(self, config: Any, *overrides: str) -> list[int]:
        return self.run(_launch, str(config), list(overrides))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _launch(config: str, overrides: list[str]) -> int:
    from mvp_engine.launch import launch

    return launch(config, overrides)


def _serve(rank: int, size: int, pipe: Any) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1)
    multiprocessing.set_start_method("fork", force=True)  # as under torchrun; spawned loader workers import everything
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    while True:
        gc.collect()  # models hold reference cycles, and with them process groups that cost time while they exist
        gc.freeze()  # keeps imported modules out of later collections
        function, args, port = pipe.recv()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            answer = pickle.dumps((None, function(*args)))
        except BaseException:  # noqa: BLE001 - raised again in the test
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
