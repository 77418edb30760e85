"""Action rows of random numbers for a tiny pi0 or a chunk regressor on a tiny Qwen3-VL; noise and times are data."""

from typing import Any

import torch
from families import config_of
from test_action_model import SIZES
from tiny_models import sample
from tiny_pi0 import tiny_pi0, tiny_pi0_config
from torch import Tensor, nn
from torch.utils.data import Dataset

from mvp_engine.config import Config, Section
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import flow
from mvp_engine.kit.actions import ActionModel, sample_actions
from mvp_engine.kit.actions.pi0 import probe_batch

ROWS = 12
DRAWS = 2


class Made(Section):
    head: str = "pi0"
    folder: str | None = None  # of a pi0; None: random weights
    text_rows: bool = False  # half of the rows have no actions, some of them no image
    text_weight: float = 0.0


class ActionConfig(Config):
    made: Made


class ActionRows(Dataset[PackedBatch]):
    def __init__(self, made: Made, seed: int) -> None:
        self.rows = pi0_rows_of(made) if made.head == "pi0" else regressor_rows()
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedBatch:
        row = self.rows[index].select([0])
        shape = tuple(row.sequence_fields["action_chunk"].shape[1:])
        drawn = flow.draw(self.seed, self.epoch, index, shape, DRAWS)
        row.sequence_fields["action_noise"] = drawn.noise[None]
        row.sequence_fields["action_times"] = drawn.times[None]
        return row


def pi0_rows_of(made: Made) -> list[PackedBatch]:
    model = tiny_pi0()
    rows = [probe_batch(model, 1 + i % 3, 2 + i % 5, seed=i, draws=DRAWS) for i in range(ROWS)]
    if not made.text_rows:
        return rows
    with_text = []
    for i, row in enumerate(rows):
        row.token_fields["token_type_ids"] = torch.zeros_like(row.input_ids)
        with_text.append(row if i % 2 else text_row(row, has_image=i % 4 == 0))
    return with_text


def text_row(row: PackedBatch, has_image: bool) -> PackedBatch:
    """A row of a vision-language data set: a prompt, with or without the images of `row`, and an answer."""
    prompt = row.input_ids if has_image else row.input_ids[-2:]
    ids = torch.cat([prompt, torch.tensor([5, 6, 7])])
    is_answer = torch.arange(len(ids)) >= len(prompt)
    fields = {name: torch.zeros_like(value) for name, value in row.sequence_fields.items()}
    media = {name: one if has_image else one.select([]) for name, one in row.media.items()}
    types = {"token_type_ids": [is_answer.long()]}
    return PackedBatch.from_sequences(
        [ids], [is_answer], token_fields=types, sequence_fields=fields, media=media
    )


def regressor_rows() -> list[PackedBatch]:
    model = LanguageModel.from_config(config_of("qwen3_vl"))
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(ROWS):
        row = sample(model, ["patches", "frame"], ["patches"] * (i % 3), g)
        row.token_fields.clear()
        row.sequence_fields["action_state"] = torch.randn(1, 4, generator=g)
        row.sequence_fields["action_chunk"] = torch.randn(1, 3, 2, generator=g)
        row.sequence_fields["action_mask"] = torch.rand(1, 3, 2, generator=g) > 0.3
        rows.append(row)
    return rows


class ActionTestEngine(Engine):
    config_class = ActionConfig
    config: ActionConfig

    def prepare_model(self) -> nn.Module:
        made = self.config.made
        if made.folder is not None:
            return ActionModel.on_meta(made.folder)
        if made.head == "pi0":
            return ActionModel.from_config(tiny_pi0_config())
        config = config_of("qwen3_vl")
        for name, value in SIZES.items():
            setattr(config, name, value)
        return ActionModel.from_config(config)

    def prepare_dataloader(self, split: str) -> Any:
        rows = ActionRows(self.config.made, self.config.seed)
        return self.sample_loader(rows, split, collate_fn=PackedBatch.concat)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        text_weight = self.config.made.text_weight
        names = ["action_losses", "loss"] if text_weight else ["action_losses"]
        outputs = self.model(micro_batch, names)
        loss_sum = outputs["action_losses"].sum()
        entries = micro_batch.sequence_fields["action_mask"].sum()
        if not text_weight:
            return loss_sum, entries
        labels = micro_batch.num_loss_tokens
        ctx.log("action_loss", loss_sum.detach(), entries)
        ctx.log("text_loss", outputs["loss"].detach(), labels)
        return loss_sum + text_weight * outputs["loss"], entries + text_weight * labels

    def eval_end(self, ctx: StepContext) -> None:
        rows = PackedBatch.concat([row for row in ActionRows(self.config.made, self.config.seed)])  # noqa: C416
        actions = sample_actions(self.model_engine, rows, steps=3)
        ctx.log("mean_action", actions.abs().mean())

    def export(self) -> None:
        folder = self.run.dir / "export"
        if not self.world.broadcast(folder.exists()):  # a run that was killed after its export
            self.model_engine.export_hf(folder)

    def after_train(self) -> None:
        super().after_train()
        self.export()
