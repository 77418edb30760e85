"""DevicePrefetcher: the order of host-to-device copies and uses."""

from __future__ import annotations

import torch

from mvp_engine.model_engine.fsdp.prefetch import DevicePrefetcher


def test_prefetcher_copies_one_micro_batch_ahead_in_order() -> None:
    events: list[str] = []

    def move(batch: str) -> str:
        events.append(f"moved {batch}")
        return batch.upper()

    for batch, counts in DevicePrefetcher(torch.device("cpu"), move)([("a", True), ("b", False), ("c", True)]):
        events.append(f"used {batch} {counts}")
    assert events == ["moved a", "moved b", "used A True", "moved c", "used B False", "used C True"]
    assert list(DevicePrefetcher(torch.device("cpu"), move)([])) == []
