"""Timeouts of decoders: a call that hangs in C code is abandoned, and its process can still exit."""

import ctypes
import subprocess
import sys
import time

import pytest
import torch

from mvp_engine.kit.data.read.decoders import run_with_timeout
from mvp_engine.kit.data.read.row_types import BadRow


@pytest.mark.slow
def test_run_with_timeout_process_exits_while_a_decoder_hangs():
    code = """
import ctypes
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.decoders import run_with_timeout
try:
    run_with_timeout(0.1, lambda: ctypes.CDLL(None).sleep(200), "it")
except BadRow as bad:
    print(bad.reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "timeout\n"


class HangingDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        try:
            return run_with_timeout(0.2, lambda: ctypes.CDLL(None).sleep(300), "it")
        except BadRow as bad:
            return bad.reason


def test_run_with_timeout_dataloader_workers_continue_and_exit():
    started = time.monotonic()
    assert list(torch.utils.data.DataLoader(HangingDataset(), batch_size=1, num_workers=1)) == [
        ["timeout"],
        ["timeout"],
    ]
    assert time.monotonic() - started < 60
