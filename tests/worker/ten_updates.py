"""Ten updates of an actor and a critic: by worker groups of any launcher, or as a script on the ranks of torchrun."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from worker_cases import batch_of, spec_of

from mvp_engine.distributed import World
from mvp_engine.kit.rl import PolicyLoss, ValueLoss
from mvp_engine.worker import Worker, WorkerGroup
from mvp_engine.worker import group as groups

LAYOUTS = {1: [{}, {}], 2: [{"shard": 2}, {"ulysses": 2}]}


def specs(ranks):
    """An actor and a critic, with different layouts where there are several ranks."""
    actor, critic = LAYOUTS[ranks]
    return spec_of(parallel=actor), spec_of(model={"type": "value_model"}, parallel=critic, seed=1)


def train(actor, critic):
    """All numbers of the updates, and the hashes of the weights after them."""
    steps = []
    for step in range(10):
        batch = batch_of(7, 3, 12, 5, 9, 4, 2, seed=step)
        old_T = actor.infer(batch, ["log_probs"], budget=16)["log_probs"]
        values_T = critic.infer(batch, ["values"], budget=16)["values"]
        rewards_T = torch.sin(torch.arange(batch.num_tokens) + float(step))
        fields = {
            "old_log_probs": old_T,
            "advantages": rewards_T - values_T,
            "returns": rewards_T,
            "old_values": values_T,
        }
        batch = dataclasses.replace(batch, token_fields={**batch.token_fields, **fields})
        for group, loss in ((actor, PolicyLoss(entropy=0.01)), (critic, ValueLoss(clip=0.2))):
            [numbers] = group.update(batch, loss, budget=16)
            assert numbers.skipped is None
            steps.append([numbers.loss, numbers.grad_norm])
    return {
        "steps": steps,
        "actor": actor.checksums(torch.float32),
        "critic": critic.checksums(torch.float32),
    }


def train_by_groups(where, ranks):
    actor_spec, critic_spec = specs(ranks)
    with WorkerGroup.start(actor_spec, ranks=ranks, where=where) as actor:
        return train(actor, WorkerGroup.start(critic_spec, name="critic", on=actor))


class SpmdGroup:
    """What a group does, without a controller: every rank has the whole batch and works on its own part."""

    def __init__(self, spec, world):
        self.worker = Worker(spec, world)
        self.world = world
        self.data_size = spec.data_size(world.size)
        self.each = spec.model_parallel_size

    def infer(self, batch, outputs, budget):
        members = groups.by_data_rank(batch, self.data_size)
        own = groups.select(batch, members[self.world.rank // self.each])
        results = self.world.all_gather(self.worker.infer(own, outputs, budget))
        return groups.merged(batch, members, results[:: self.each])

    def update(self, batch, loss, budget):
        members = groups.by_data_rank(batch, self.data_size)
        own = groups.select(batch, members[self.world.rank // self.each])
        results = self.world.all_gather(self.worker.update([own], loss, budget))
        return results[0]

    def checksums(self, dtype):
        return self.world.broadcast(self.worker.checksums(dtype))


def main(out):
    world = World.join("cpu")
    found = train(*(SpmdGroup(spec, world) for spec in specs(world.size)))
    if world.is_main:
        Path(out).write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
