"""Small host collectives of World: equal to a reduction over all ranks, with a number of messages that grows slowly."""

import pytest
import torch
import torch.distributed as dist

from mvp_engine.distributed import World


def reduced():
    world = World.join("cpu")
    total = world.all_reduce([1.0 + world.rank, 0.1 * world.rank], torch.add)
    largest = world.all_reduce([float(world.rank), -1.0 - world.rank], torch.maximum)
    flags = world.any(world.rank == 1, False, True)
    world.close()
    return total, largest, flags


def test_world_all_reduce_equals_reduction_over_four_ranks(ranks4):
    found = ranks4.run(reduced)
    assert found == [found[0]] * 4  # bit-equal on all ranks
    total, largest, flags = found[0]
    assert total == pytest.approx([10.0, 0.6])
    assert largest == [3.0, -1.0]
    assert flags == [True, False, True]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_world_all_reduce_on_any_size_has_logarithmic_messages(size, monkeypatch):
    """All ranks in one process: each is a generator of its messages, which are delivered in turn."""
    import queue
    import threading

    boxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    sent = dict.fromkeys(range(size), 0)
    local = threading.local()

    class Sent:
        def wait(self): ...

    def send(tensor, dst, group=None):
        sent[local.rank] += 1
        boxes[local.rank, dst].put(tensor.clone())
        return Sent()

    def recv(tensor, src, group=None):
        tensor.copy_(boxes[src, local.rank].get(timeout=60))

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(dist, "recv", recv)
    results = {}

    def run(rank):
        local.rank = rank
        world = World(rank, size, 0, 1, torch.device("cpu"))
        results[rank] = world.all_reduce([float(rank), 0.1 * rank], torch.add)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(results[rank] == results[0] for rank in range(size))
    assert results[0] == pytest.approx([size * (size - 1) / 2, 0.1 * size * (size - 1) / 2])
    assert max(sent.values()) <= size.bit_length()
