"""The training step of a config on simulated ranks: bytes held, parameters and collectives of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.data.step_plan import StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.engine import StepContext
from mvp_engine.kit import MLLMModelKit, OptimKit, OptimSettings, TokenNormedLossKit
from mvp_engine.log import MetricStore
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.model_engine.optim import build_optimizer
from mvp_engine.tools.plan.fake_ranks import check_engine, fake_world, simulated_step
from mvp_engine.tools.plan.memory import bytes_of_ranks, held_bytes
from mvp_engine.tools.plan.ranks import chosen_ranks, group_names
from mvp_engine.tools.plan.record import Collective


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and calls in a step."""

    rank: int
    stage: int  # of the pipeline
    held: dict[str, int]  # bytes by kind
    parameters: int  # of this rank's shards
    calls: list[Collective]
    host_calls: int  # host collectives
    groups: dict[tuple[int, ...], str]  # names of its process groups
    bytes_of_ranks: dict[int, int]  # of all kinds, for the ranks that share its parameters


class Simulation:
    """`parallel`: the section of the layout, which in an RL config is that of the actor."""

    def __init__(
        self, config: Any, size: int, gpus_per_node: int = 8, parallel: Any = None
    ) -> None:
        self.config = config
        self.parallel = parallel or config.parallel
        self.size = size
        self.gpus_per_node = gpus_per_node
        self._codes = dict[int, int]()  # see ShapesOnly
        precision = "bf16" if config.loop.precision == "auto" else config.loop.precision
        settings = Settings.from_config(config, precision)
        # Neither changes a collective.
        self.settings = replace(settings, compile=None, offload="none")

    def ranks(self, wanted: str | None = None) -> list[int]:
        """The ranks to simulate; raises a UserError if the layout does not fit the number of ranks."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            return chosen_ranks(Layout.of(world, self.parallel), wanted)

    def check(self) -> None:
        """Build rank 0: what a training would refuse at its start is refused here, by the same code."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            layout = Layout.of(world, self.parallel)
            model = self.config.model
            kind = engine_class(model.type, model.backend)
            check_engine(kind, lambda checked: self._build(checked, layout))

    def run(self, rank: int, micro_batches: list[PackedBatch]) -> RankPlan:
        with fake_world(rank, self.size, self.gpus_per_node) as world:
            layout = Layout.of(world, self.parallel)

            def step(engine: Any) -> None:
                world.host_calls = 0
                self._train_batch(engine, micro_batches)

            model = self.config.model
            engine, recorder = simulated_step(
                engine_class(model.type, model.backend),
                lambda kind: self._build(kind, layout),
                step,
                self._codes,
            )
            local = [local_tensor(param) for param in engine.model.parameters()]
            return RankPlan(
                rank,
                layout.stage,
                held_bytes(engine),
                sum(param.numel() for param in local),
                recorder.calls,
                world.host_calls,
                group_names(layout),
                bytes_of_ranks(engine),
            )

    def _build(self, kind: type[Any], layout: Layout) -> Any:
        config = self.config
        model = MLLMModelKit(getattr(config, "lora", None)).build(config.model, config.model.type)
        engine = kind(model, layout, self.settings)
        if isinstance(config.optim, OptimSettings):
            engine.initialize(OptimKit(config.optim, config.seed).build_optimizer)
        else:
            engine.initialize(lambda model: build_optimizer(model, config.optim))
        return engine

    def _train_batch(self, engine: Any, micro_batches: list[PackedBatch]) -> None:
        batches = [_without_values(batch) for batch in micro_batches]
        kinds = tuple(media_kinds(batch) for batch in batches)
        plan = StepPlan((kinds,) * engine.layout.data_size)
        ctx = StepContext(1, 0, "train", MetricStore(engine.world), batches, plan)
        loss = TokenNormedLossKit(getattr(self.config, "loss", None))

        def forward_step(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
            if "log_probs" in engine.model.provides:
                return loss(ctx, engine.model, batch)
            outputs = engine.model(batch, ["values"])
            return outputs["values"].sum(), batch.num_loss_tokens

        engine.train_batch(batches, forward_step, plan)


def _without_values(batch: PackedBatch) -> PackedBatch:
    """The batch with media as fake tensors; of an assumed batch they are on the meta device."""
    media = dict[str, Media]()
    for kind, one in batch.media.items():
        media[kind] = replace(one, values=torch.empty(one.values.shape, dtype=torch.float32))
    return replace(batch, media=media)
