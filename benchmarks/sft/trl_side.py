"""TRL's side: SFTTrainer, which packs the rows itself, in one of two ways.

`bfd`, its own choice, keeps rows whole and apart: positions start anew with each, so transformers gives SDPA a mask of
L x L for packs of L tokens. A batch becomes one long pack, and its mask grows with the square: so batches are of one.
`wrapped` cuts all rows, end to end, into blocks of one length. No mask is needed, but rows in a block see each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE

if __package__:
    from .data import PAD, Row
else:
    from data import PAD, Row


def lengths(labels_BL: Tensor, mask_BL: Tensor | None) -> list[int]:
    """Of the rows, or of what is left of them, in a batch that TRL has packed. A row starts with a block, and where
    the label is left out: of the text, only first tokens have none."""
    starts = labels_BL == IGNORE
    starts[:, 0] = True
    found: list[int] = []
    for i, start in enumerate(starts.cpu()):
        size = len(start) if mask_BL is None else int(mask_BL[i].sum())  # the last block of all may be padded
        at = torch.cat([start[:size].nonzero().flatten(), torch.tensor([size])])
        found += at.diff().tolist()
    return found


def trl_trainer(
    model: Any, common: dict[str, Any], data: list[Row], packing: str, longest: int, batch: int, steps: int
) -> Any:
    """After training, its `sequences()` are the lengths of what it was trained on, step by step."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Counted(SFTTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            batch = (inputs["labels"], inputs.get("attention_mask"))  # looked at later, so that nothing waits for it
            seen.setdefault(self.state.global_step, []).append(batch)
            return super().training_step(model, inputs, *args, **kwargs)

        def sequences(self) -> list[list[int]]:
            return [[length for batch in seen[step] for length in lengths(*batch)] for step in range(steps)]

    seen: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
    ids = [row.ids.tolist() for row in data]
    labels = [[IGNORE, *row[1:]] for row in ids]  # else `wrapped` would predict a row's first token from another row
    packs = max(1, round(sum(map(len, ids)) / steps / longest))  # about the others' tokens a step
    batch = 1 if packing == "bfd" else min(batch, packs)
    arguments = SFTConfig(
        **common,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=packs // batch,
        packing=True,
        packing_strategy=packing,
        max_length=longest,
        shuffle_dataset=True,  # `bfd` begins with the longest rows: the steps that count would have few of them
    )
    pad = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"pad": PAD}, "pad")), pad_token="pad")
    dataset = Dataset.from_dict({"input_ids": ids, "labels": labels})
    return Counted(model, arguments, train_dataset=dataset, processing_class=pad)
