"""Garbage collection around imports and trainings: what stays is not looked at, what is dropped is freed."""

import gc
import subprocess
import sys
import weakref

import forked
import pytest

from mvp_engine.process import signals
from mvp_engine.process.signals import settled, without_collections


@pytest.fixture(autouse=True)
def as_in_a_launch(monkeypatch):
    monkeypatch.setattr(signals, "settle", forked.SETTLE)
    monkeypatch.setattr(signals, "gc", gc)
    yield
    gc.freeze()  # as before: what the tests have imported


class Cycle:
    def __init__(self):
        self.me = self


def test_settled_frees_cycles_made_before_inside_and_after_it():
    before, kept = Cycle(), Cycle()
    seen = [weakref.ref(before), weakref.ref(kept)]
    del before
    with settled():
        assert seen[0]() is None  # garbage is not kept
        assert gc.get_freeze_count() > 0
        inside = Cycle()
        seen.append(weakref.ref(inside))
        del inside, kept
        gc.collect()
        assert seen[2]() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen[1]() is None  # dropped inside: freed afterwards


def test_without_collections_collects_again_afterwards():
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_frozen_cycle_is_freed_when_the_interpreter_ends():
    """Libraries with a check for leaks, such as Triton's bindings, would report it."""
    made = "class Cycle:\n  def __del__(self): print('freed')\none = Cycle()\none.me = one\ngc.freeze()\ndel one\n"
    for imported, printed in (("", ""), ("import mvp_engine.process.signals\n", "freed\n")):
        command = [sys.executable, "-c", f"import gc\n{imported}{made}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == printed
