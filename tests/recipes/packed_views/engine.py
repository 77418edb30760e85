"""Contrastive training of a tiny Qwen3-VL on packed sequences: an image with text, and a text about it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from families import config_of
from tiny_models import build_model, sample
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file

ROOT = Path(__file__).parents[3]
NumbersEngine: Any = import_file(ROOT / "recipes/contrastive/engine.py").NumbersEngine
WITHOUT_IMAGES = 20  # of 24 rows: a rank may have no image in a micro-batch


def made_rows(count: int) -> list[PackedBatch]:
    """Each row is a batch of two sequences; the second has no image."""
    model = build_model(LanguageModel, "qwen3_vl")
    g = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        items = [] if index < WITHOUT_IMAGES else ["patches"]
        views = [sample(model, ["patches", "frame"], one, g) for one in (items, [])]
        rows.append(PackedBatch.concat(views))
    return rows


class ViewsEngine(NumbersEngine):
    def prepare_model(self) -> nn.Module:
        return LanguageModel.from_config(config_of("qwen3_vl"))

    def prepare_dataloader(self, split: str) -> Any:
        return self.sample_loader(made_rows(24), split, collate_fn=PackedBatch.concat)

    def scalars(self) -> dict[str, Tensor]:
        return {}

    def embed(self, micro_batch: PackedBatch) -> Tensor:
        hidden_TD = self.model(micro_batch, ["hidden_states"])["hidden_states"]
        last_SD = hidden_TD[micro_batch.cu_seqlens[1:].long() - 1]
        return F.normalize(last_SD, dim=-1).unflatten(0, (-1, 2))
