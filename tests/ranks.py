"""Rank processes that stay up between tests, forked from a server that has done the imports."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback

import probe_once
from forked import fork_context, save_time


class RankProcesses:
    """Rank processes that pools of several sizes share: a pool of two uses the first two of a pool of four."""

    def __init__(self):
        self.pipes = []
        self.processes = []

    def grow(self, size):
        context = fork_context()
        for rank in range(len(self.processes), size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=False)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes = []
        self.processes = []


class RankPool:
    """`size` processes that act as the ranks of a job: `pool.run(f, *args)` calls `f(*args)` on all of them at once
    and returns the results in rank order.

    Each call sets torchrun's environment variables with a fresh port, so `f` may join and leave a process group.
    """

    def __init__(self, size, shared=None):
        """`shared`: processes that other pools use, too, and that outlive this one."""
        self.size = size
        self._shared = shared
        self._own = shared or RankProcesses()
        self._own.grow(size)

    @property
    def pipes(self):
        return self._own.pipes[: self.size]

    @property
    def processes(self):
        return self._own.processes[: self.size]

    def run(self, function, *args, timeout=120.0):
        self._own.grow(self.size)  # another pool may have ended them
        with reserve_port() as held:
            return self._run(function, args, timeout, held.getsockname()[1])

    def _run(self, function, args, timeout, port):
        for pipe in self.pipes:
            pipe.send((function, args, self.size, port, probe_once.current_file()))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                for process in self.processes:  # each rank prints its stack
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(1.0)
                self._restart(rank)
                errors = "\n".join(error for error, _ in answers if error)
                raise TimeoutError(
                    f"rank {rank} of {self.size} returned nothing in {timeout} s\n{errors}"
                )
            try:
                # `recv` would open a socket for each tensor.
                answers.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                code = self._restart(rank)
                raise EOFError(f"rank {rank} of {self.size} died with exit code {code}") from None
        for rank, (error, _) in enumerate(answers):
            if error:
                self._own.close()  # a process group that was left open would fail the tests that follow
                raise AssertionError(f"rank {rank} failed:\n{error}")
        return [value for _, value in answers]

    def _restart(self, rank):
        """New processes, for the tests that follow; returns the exit code of a rank."""
        self.processes[rank].join(1.0)
        code = self.processes[rank].exitcode
        self._own.close()
        self._own.grow(self.size)
        return code

    def launch(self, config, *overrides):
        return self.run(_launch, str(config), list(overrides))

    def close(self):
        if self._shared is None:
            self._own.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _launch(config, overrides):
    from mvp_engine.launch import launch

    return launch(config, overrides)


def _serve(rank, pipe):
    import torch

    import mvp_engine.hf.model.adapter  # noqa: F401 - for `probe_once`

    faulthandler.register(signal.SIGUSR1)
    # As under torchrun; spawned loader workers import everything.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    save_time()
    probe_once.install(on_ranks=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    gc.freeze()
    while True:
        gc.collect()  # models hold reference cycles, and with them process groups that cost time while they exist
        gc.freeze()  # keeps imported modules out of later collections
        function, args, size, port, probe_once.FILE[0] = pipe.recv()
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            answer = pickle.dumps((None, function(*args)))
        except BaseException:  # noqa: BLE001 - raised again in the test
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)


def free_port():
    with reserve_port() as held:
        return int(held.getsockname()[1])


def reserve_port():
    """A socket that keeps a port: no other process is given it, and a server of ours may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
