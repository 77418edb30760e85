"""Answers by greedy decoding, on packed batches, through the model engine: on any layout, with any numbers of prompts.

There is no key-value cache: each new token costs a pass over prompts and answers so far, encoders included. That is
right for evaluations with short answers while training; to serve a model, export it. Prompts whose answer has ended
leave the batch, so a pass holds only what is still being written, without padding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.model_engine import ModelEngine


@dataclass(frozen=True)
class Answer:
    """To the last question of a row."""

    source: int
    sample: int
    expected: str
    written: str
    prompt: str = ""  # what the model had to go on from
    open: bool = False  # the row is text and no chat: how it goes on is neither right nor wrong

    @property
    def right(self) -> bool:
        return self.written == self.expected


def answer(
    engine: ModelEngine,
    batches: list[PackedBatch],
    tokenizer: Any,
    *,
    max_new_tokens: int,
    prompt_tokens: int = 1,
    stop: Collection[int] | None = None,
    budget: int | None = None,
) -> list[Answer]:
    """What the model answers to batches of a data kit, beside what the rows say, as texts without special tokens.

    A row that is all text and no chat is given up to its first `prompt_tokens`, if it has more, and what is expected
    is as long as what may be written. `stop` is the tokenizer's end token by default. As with `generate`, ranks call it
    together, some with no batches.
    """
    found = [(batch, *split_answers(batch, prompt_tokens)) for batch in batches]
    prompts = [prompts for _, prompts, _, _ in found if prompts is not None]
    written = generate(
        engine,
        PackedBatch.concat(prompts) if prompts else None,
        max_new_tokens=max_new_tokens,
        stop={tokenizer.eos_token_id} if stop is None else stop,
        budget=budget,
    )
    answers: list[Answer] = []
    for batch, given, every, kept in found:
        for i, (s, expected) in enumerate(zip(kept, every, strict=True)):
            is_open = bool(
                batch.labels[batch.cu_seqlens[s]] != IGNORE
            )  # nothing comes before what is learnt
            asked = given.select([i]).input_ids.tolist() if given else list[int]()
            parts = (expected[: max_new_tokens if is_open else None], written[len(answers)], asked)
            wanted, said, prompt = (
                tokenizer.decode(ids, skip_special_tokens=True) for ids in parts
            )
            source, sample = (int(batch.sequence_fields[name][s]) for name in ("source", "sample"))
            answers.append(Answer(source, sample, wanted, said, prompt, is_open))
    return answers


def split_answers(
    batch: PackedBatch, prompt_tokens: int = 1
) -> tuple[PackedBatch | None, list[list[int]], list[int]]:
    """Each sequence up to its last answer, for `generate`; those answers; and which sequences they are.

    An answer is a run of tokens that carry loss; of one that begins with the sequence, the first `prompt_tokens` are
    its prompt. Left out are sequences without an answer, and those with media behind it (`media_end` of a data kit).
    Everything is on the CPU.
    """
    batch = batch.to("cpu")
    seen = batch.sequence_fields.get("media_end", torch.zeros(batch.num_sequences)).tolist()
    prompts, answers, kept = [], [], []
    for s, labels in enumerate(batch.labels.split(batch.lengths.tolist())):
        learnt = (labels != IGNORE).nonzero()[:, 0]
        if not len(learnt):
            continue
        gaps = (learnt.diff() > 1).nonzero()[:, 0]
        first = int(learnt[int(gaps[-1]) + 1 if len(gaps) else 0])
        if first == 0:
            first = min(prompt_tokens, len(learnt)) - 1
        if seen[s] > first + 1:
            continue
        answers.append(labels[first : int(learnt[-1]) + 1].tolist())
        prompts.append(_extended(batch.select([s]), first + 1, []))
        kept.append(s)
    return (PackedBatch.concat(prompts) if prompts else None), answers, kept


def generate(
    engine: ModelEngine,
    prompts: PackedBatch | None,
    *,
    max_new_tokens: int,
    stop: Collection[int],
    budget: int | None = None,
) -> list[list[int]]:
    """What the model writes after each prompt, up to and with the first token of `stop`.

    On a layout with shards all ranks call it together, each with prompts of its own, or None. A pass has at most
    `budget` tokens, unless one sequence alone has more.
    """
    sequences = (
        []
        if prompts is None
        else [prompts.to("cpu").select([s]) for s in range(prompts.num_sequences)]
    )
    written: list[list[int]] = [[] for _ in sequences]
    open_ones = list(range(len(sequences)))
    with engine.eval_mode():
        for _ in range(max_new_tokens):
            parts, members = [], []
            if open_ones:
                batch = PackedBatch.concat(
                    [_extended(sequences[s], None, written[s]) for s in open_ones]
                )
                split = batch.split(max(budget or batch.num_tokens, batch.max_seqlen))
                parts, members = split.parts, [[open_ones[i] for i in one] for one in split.members]
            passes = _passes(engine, parts)
            if passes is None:  # on every rank at the same time, where they depend on each other
                break
            for chosen, last in zip(members, passes, strict=True):
                for s, token in zip(chosen, last, strict=True):
                    written[s].append(token)
            open_ones = [s for s in open_ones if written[s][-1] not in stop]
    return written


def _passes(engine: ModelEngine, parts: list[PackedBatch]) -> list[list[int]] | None:
    """The next token of each sequence of each part; None if no rank that this one works with has any part left."""
    found, ran = [], False
    for part, counts in engine.in_step(parts):
        ran = True
        tokens = engine.infer_step(
            part, lambda batch: engine.model(batch, ["next_tokens"])["next_tokens"]
        )
        if counts:
            found.append(tokens[part.cu_seqlens[1:].long().to(tokens.device) - 1].tolist())
    return found if ran else None


def _extended(one: PackedBatch, length: int | None, new: list[int]) -> PackedBatch:
    """The first `length` tokens of one sequence with `new` ones behind, nothing to learn, and what a forward takes.

    Written tokens are text: on every axis their positions go on behind the largest.
    """
    ids, positions = one.input_ids[:length], one.position_ids[..., :length]
    behind = int(positions.max()) + 1 + torch.arange(len(new))
    ids = torch.cat([ids, torch.tensor(new, dtype=ids.dtype)])

    def typed(value: Tensor) -> Tensor:
        return torch.cat([value[:length], value.new_zeros(len(new), *value.shape[1:])])

    return PackedBatch(
        ids,
        torch.full_like(ids, IGNORE),
        torch.cat([positions, behind.expand(*positions.shape[:-1], -1)], dim=-1),
        torch.tensor([0, len(ids)], dtype=torch.int32),
        {
            name: typed(value)
            for name, value in one.token_fields.items()
            if name.endswith("token_type_ids")
        },
        {},
        one.media,
    )
