"""Experience: prompts, their samples and rewards, on the way from the rollout to the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rewards import Reward
from mvp_engine.kit.rl.rollout import Sample


@dataclass
class Experience:
    """Samples of a step; `samples[i].prompt` is an index into `prompts`, and `rewards[i]` its reward.

    The reward of a sample may have failed: then it has no value, and nothing is learnt from the sample.
    """

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    batches: int = 0  # batches of prompts that were taken from the loader for it
    epoch: int = 0
    place: dict[str, Any] = field(default_factory=dict)  # in the data, of the first of them
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, weight)

    def log(self, name: str, value: float, weight: float = 1.0) -> None:
        total = self.metrics.get(name, (0.0, 0.0))
        self.metrics[name] = (total[0] + value, total[1] + weight)

    def groups(self) -> list[list[int]]:
        """The indices of the samples of each prompt; a prompt may have none."""
        members: list[list[int]] = [[] for _ in self.prompts]
        for index, sample in enumerate(self.samples):
            members[sample.prompt].append(index)
        return members

    def add(self, other: Experience, prompts: list[int]) -> None:
        """Append some prompts of another one, with their samples and rewards."""
        groups = other.groups()
        for prompt in prompts:
            self.prompts.append(other.prompts[prompt])
            for index in groups[prompt]:
                sample = other.samples[index]
                at = len(self.prompts) - 1
                self.samples.append(Sample(**{**vars(sample), "prompt": at}))
                self.rewards.append(other.rewards[index])

    def prompts_with_signal(self) -> list[int]:
        """The prompts whose samples have different rewards: the others have no advantages."""
        found = []
        for prompt, members in enumerate(self.groups()):
            values = {self.rewards[index].value for index in members} - {None}
            if len(values) > 1:
                found.append(prompt)
        return found

    def trainable(self) -> list[int]:
        """The samples with a reward and at least one token."""
        pairs = zip(self.samples, self.rewards, strict=True)
        return [
            i for i, (sample, one) in enumerate(pairs) if sample.tokens and one.value is not None
        ]

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the prompts, which are read from the data again."""
        return {
            "keys": [prompt.key for prompt in self.prompts],
            "samples": [dict(vars(sample)) for sample in self.samples],
            "rewards": [dict(vars(reward)) for reward in self.rewards],
            "batches": self.batches,
            "epoch": self.epoch,
            "place": self.place,
            "metrics": {name: list(pair) for name, pair in self.metrics.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], read: list[Prompt]) -> Experience:
        """`read`: the prompts of the same batches of the loader."""
        by_key = {prompt.key: prompt for prompt in read}
        return cls(
            [by_key[key] for key in state["keys"]],
            [Sample(**sample) for sample in state["samples"]],
            [Reward(**reward) for reward in state["rewards"]],
            state["batches"],
            state["epoch"],
            state["place"],
            {name: (value, weight) for name, (value, weight) in state["metrics"].items()},
        )
