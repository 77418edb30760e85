"""Processes forked from a server that has imported torch, transformers and the package.

Imports are most of the start-up cost of a process: 4 CPU seconds. Multiprocessing's fork server imports once and has no
threads, so forking it is safe. Forked processes have their own process id, session, signals and exit code, like any
other; what they do not test is a start from nothing. The workers of a forked torchrun are forked, too, unless a test
needs them to be torchrun's children.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace

from mvp_engine.process import signals, watchdog

SETTLE = signals.settle
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.run",
    "mvp_engine.launch",
]
PRELOAD += ["mvp_engine.model_engine", "mvp_engine.kit"]
PRELOAD += ["transformers.modeling_utils", "transformers.masking_utils", "transformers.models.auto"]


def fork_context():
    """The multiprocessing context of this test process' fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def save_time():
    """Leave out what a launch does for long trainings only.

    Data stays in the page cache, which outlives a killed process: eight calls of fsync, 5 ms each. And what this
    process has imported stays frozen: after `gc.unfreeze` a collection looks at all of it, in 0.3 to 0.6 s.
    """
    os.fsync = lambda _: None
    signals.settle = _do_nothing
    signals.gc = SimpleNamespace(**{**vars(gc), "freeze": _do_nothing, "unfreeze": _do_nothing})


def _do_nothing(): ...


class ForkedModule:
    """`python -m module args` or `python file.py args`, forked: the part of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        module,
        args,
        environment,
        folder,
        fresh_workers,
    ):
        context = fork_context()
        forkserver.ensure_running()
        server = None if fresh_workers else forkserver._forkserver._forkserver_address
        reader, writer = context.Pipe(duplex=False)
        target_args = (module, args, environment, folder, writer, server)
        self._process = context.Process(target=_run_module, args=target_args, daemon=False)
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), "r")
        reader.close()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the end of the process and return what it printed since the last read."""
        output = []
        reading = threading.Thread(target=lambda: output.append(self.stdout.read()), daemon=True)
        reading.start()
        reading.join(timeout)
        if reading.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(timeout)
        self.stdout.close()
        return output[0], None

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended since
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class ForkedWorker(ForkedModule):
    """A worker of torchrun, which writes to torchrun's own output."""

    def __init__(self, command, environment):
        module = command.index("-m") + 1
        output = Connection(os.dup(1), readable=False)
        words = list(command[module + 1 :])
        target_args = (command[module], words, environment, os.getcwd(), output, None, os.getpid())
        self._process = fork_context().Process(target=_run_module, args=target_args, daemon=False)
        self._process.start()
        output.close()
        self.pid = self._process.pid


def _fork_workers(server):
    """Let torchrun in this process fork its workers from the server at this address."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    forkserver._forkserver._forkserver_address = server
    forkserver._forkserver.ensure_running = lambda: None
    handler = subprocess_handler.SubprocessHandler
    handler._popen = lambda self, command, environment: ForkedWorker(command, environment)


def _end_with(launcher):
    """End this process when its launcher has: a child of torchrun would notice, one of the fork server would not."""
    select.select([os.pidfd_open(launcher)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _run_module(
    module,
    args,
    environment,
    folder,
    output,
    server,
    launcher=None,
):
    os.setsid()
    if launcher is not None:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    watchdog.PARENT = os.getppid()
    multiprocessing.set_start_method(None, force=True)  # that of a process with no fork server
    save_time()
    gc.freeze()
    if threads := environment.get("OMP_NUM_THREADS"):  # OpenMP is loaded already
        import torch

        torch.set_num_threads(int(threads))
    if server is not None:
        _fork_workers(server)
    sys.argv = [module, *args]
    # The module is imported already.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    code = _exit_code(module)
    threading._shutdown()  # joins threads, as the interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _exit_code(module):
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        traceback.print_exc()
        return 1
    return 0
