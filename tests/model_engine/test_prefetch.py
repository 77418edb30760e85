"""DevicePrefetcher: the order of host-to-device copies and uses."""

import torch

from mvp_engine.model_engine.fsdp.base_engine import DevicePrefetcher
from mvp_engine.model_engine.fsdp.lockstep import Scheduled


def test_prefetcher_copies_one_micro_batch_ahead_in_order():
    events = []

    def move(batch):
        events.append(f"moved {batch}")
        return batch.upper()

    scheduled = [Scheduled("a", False), Scheduled("b", True), Scheduled("c", False)]
    for batch, is_dummy in DevicePrefetcher(torch.device("cpu"), move)(scheduled):
        events.append(f"used {batch} {is_dummy}")
    assert events == [
        "moved a",
        "moved b",
        "used A False",
        "moved c",
        "used B True",
        "used C False",
    ]
    assert list(DevicePrefetcher(torch.device("cpu"), move)([])) == []
