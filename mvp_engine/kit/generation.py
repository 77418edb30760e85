"""Answers of a model to the prompts of rows: what evaluations compare with the rows' own answers.

Decoding itself, with a KV cache, is in `decoding.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine import plugins
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.decoding import Decoding, complete, with_completion
from mvp_engine.model_engine import ModelEngine


@dataclass(frozen=True)
class Answer:
    """The completion of a row's last prompt, and the text that the row has there."""

    source: int
    sample: int
    expected: str
    written: str
    prompt: str = ""
    # The row is plain text, not a chat: no completion is right or wrong.
    is_continuation: bool = False
    verdict: bool | None = None  # whether `score` calls it right; None: neither right nor wrong

    @property
    def right(self) -> bool:
        """Whether it is the expected text, to the letter."""
        return self.written == self.expected

    def media_files(self) -> list[bytes]:
        """Media of the answer itself, for the report page."""
        return []


Verdicts = Sequence[bool | None]  # of answers, in their order


@dataclass(frozen=True)
class Prompt:
    """One sequence of a batch up to its last answer."""

    sequence: int  # its index in the batch
    batch: PackedBatch  # of one sequence, on the CPU, without labels
    expected: list[int]
    is_continuation: bool


Completions = Sequence[tuple[Prompt, list[int]]]  # prompts, and the tokens that complete them


def check_writes(model: Any, key: str | None) -> None:
    """Raise if `key` asks a model for text that writes none."""
    if key is not None and "next_logits" not in model.provides:
        name = model.hf.config.model_type
        does = plugins.without_text().get(name)
        it_does = f". It {does}" if does else ""
        raise UserError(f"{key}: {name} writes no text: set {key}=null{it_does}")


def generate_answers(
    engine: ModelEngine,
    batches: list[PackedBatch],
    tokenizer: Any,
    *,
    max_new_tokens: int,
    prompt_tokens: int = 1,
    stop: Collection[int] | None = None,
    budget: int | None = None,
    keep: list[tuple[Prompt, list[int]]] | None = None,
) -> list[Answer]:
    """Complete the last prompt of each row in batches of a data kit, decoded without special tokens.

    The prompt of a row of plain text is its first `prompt_tokens` tokens, and the expected text is then cut to
    `max_new_tokens`. `stop` defaults to the tokenizer's end-of-sequence token. Ranks call it together, as they call
    `generate`; some may have no batches. `keep` gets the prompts with the tokens of their completions.
    """
    rows = []
    for batch in batches:
        rows += [(batch, prompt) for prompt in split_prompts(batch, prompt_tokens)]
    packed = (
        PackedBatch.concat([prompt.batch.without_targets() for _, prompt in rows]) if rows else None
    )
    completions = generate(
        engine,
        packed,
        max_new_tokens=max_new_tokens,
        stop={tokenizer.eos_token_id} if stop is None else stop,
        budget=budget,
    )
    if keep is not None:
        keep += [(prompt, tokens) for (_, prompt), tokens in zip(rows, completions, strict=True)]
    answers = []
    for (batch, prompt), completion in zip(rows, completions, strict=True):
        fields = batch.sequence_fields
        expected = prompt.expected[:max_new_tokens] if prompt.is_continuation else prompt.expected
        answers.append(
            Answer(
                source=int(fields["source"][prompt.sequence]),
                sample=int(fields["sample"][prompt.sequence]),
                expected=tokenizer.decode(expected, skip_special_tokens=True),
                written=tokenizer.decode(completion, skip_special_tokens=True),
                prompt=tokenizer.decode(prompt.batch.input_ids.tolist(), skip_special_tokens=True),
                is_continuation=prompt.is_continuation,
            )
        )
    return answers


def with_verdicts(answers: list[Answer], verdicts: Verdicts | None) -> list[Answer]:
    """The answers with what `score` returned for them."""
    if verdicts is None:
        return answers
    if len(verdicts) != len(answers):
        raise UserError(
            f"score: it returned {count(len(verdicts), 'verdict')} for {count(len(answers), 'answer')}: return one "
            "for each, True, False or None, or return None for all"
        )
    pairs = zip(answers, verdicts, strict=True)
    return [replace(answer, verdict=None if one is None else bool(one)) for answer, one in pairs]


def write_answers(file: Path, step: int, sources: list[str], answers: list[Answer]) -> None:
    """Write the answers of one evaluation as lines of JSON; those of other steps in the file stay."""
    lines = []
    if file.exists():
        with file.open(encoding="utf-8") as old:
            lines = [line for line in old if json.loads(line)["step"] != step]
    for answer in answers:
        record = {"step": step, **vars(answer), "source": sources[answer.source]}
        record["right"] = record.pop("verdict")
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    atomic_write_text(file, "".join(lines))


def read_answers(file: Path, sources: list[str]) -> list[Answer]:
    """The answers of the last evaluation that `write_answers` wrote."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    last = max((record["step"] for record in records), default=0)
    answers = []
    for record in records:
        if record.pop("step") == last and record["source"] in sources:
            record |= {"source": sources.index(record["source"]), "verdict": record.pop("right")}
            answers.append(Answer(**record))
    return answers


def split_prompts(batch: PackedBatch, prompt_tokens: int = 1) -> list[Prompt]:
    """Split each sequence into its prompt, for `generate`, and its last answer.

    An answer is a run of tokens that carry loss. If it begins with the sequence, the sequence is plain text, and its
    first `prompt_tokens` are the prompt. Sequences without an answer, and those with media after it (`media_end` of a
    data kit), are left out.
    """
    batch = batch.to("cpu")
    no_media = torch.zeros(batch.num_sequences)
    media_ends = batch.sequence_fields.get("media_end", no_media).tolist()
    prompts = []
    for sequence, labels_L in enumerate(batch.labels.split(batch.lengths.tolist())):
        with_loss = (labels_L != IGNORE).nonzero()[:, 0]
        if not len(with_loss):
            continue
        gaps = (with_loss.diff() > 1).nonzero()[:, 0]
        # labels[i] is the token after position i, so an answer that starts at i has i + 1 tokens before it.
        first = int(with_loss[int(gaps[-1]) + 1 if len(gaps) else 0])
        if first == 0:
            first = min(prompt_tokens, len(with_loss)) - 1
        if media_ends[sequence] > first + 1:
            continue
        prompt = with_completion(batch.select([sequence]), first + 1, [])
        expected = labels_L[first : int(with_loss[-1]) + 1].tolist()
        is_continuation = bool(labels_L[0] != IGNORE)
        prompts.append(Prompt(sequence, prompt, expected, is_continuation))
    return prompts


def encode_prompt(
    encoder: RowEncoder, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
) -> PackedBatch:
    """A conversation as a batch of one sequence, which an answer continues.

    The content of a message is text, or a list of parts such as {"type": "text", "text": ...}. Without a chat template
    a model continues plain text.
    """
    raw: dict[str, Any] = {"text": "".join(map(_plain_text, messages))}
    row_format = RowFormat("text")
    if encoder.template.renderer.chat_template:
        raw = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        # Media are parts of messages, so <image> in a text is text.
        row_format = RowFormat(prompt_only=True, media_tags=False)
    try:
        sequences = encoder.encode(raw, row_format, Path.cwd(), fit=False)
        (batch,) = encoder.load(sequences, Path.cwd(), {})
    except BadRow as bad:
        raise UserError(f"{bad.reason}: {bad.detail}") from None
    return replace(batch, sequence_fields={})


def prompt_of_ids(encoder: RowEncoder, ids: Sequence[int]) -> PackedBatch:
    """Token ids without media as a batch of one sequence."""
    first = PackedBatch.from_sequences(
        [torch.tensor(ids[:1])], [torch.tensor([False])], media=encoder.media.empty()
    )
    return encoder.extend(first, ids[1:], {}, len(ids))


def _plain_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def generate(
    engine: ModelEngine,
    prompts: PackedBatch | None,
    *,
    max_new_tokens: int,
    stop: Collection[int],
    budget: int | None = None,
) -> list[list[int]]:
    """The completion of each prompt by greedy decoding, up to and including the first token in `stop`.

    On a sharded layout all ranks call it together, each with prompts of its own, or None. The forward over prompts has
    at most `budget` tokens, unless a single one has more.
    """
    decoding = Decoding(max_new_tokens=max_new_tokens, stop=stop, budget=budget)
    return [completion.tokens for completion in complete(engine, prompts, decoding)]


# Evaluations of an MLLMEngine by generation: which rows get an answer, and what is logged and written of the answers.


class EvalGenerationKit:
    """Completes prompts of held-out rows in each evaluation of an engine, if its config has `eval.generation`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.settings = engine.config.eval.generation
        self.batches: list[PackedBatch] = []  # rows of the running evaluation that get an answer

    def add(self, ctx: StepContext, batch: PackedBatch) -> None:
        """Keep the rows of a micro-batch that `engine.generation_rows` chooses."""
        if self.settings is None or ctx.is_dummy:
            return
        rows = self.engine.generation_rows(batch).nonzero()[:, 0].tolist()
        if rows:
            # On the CPU: the device could not hold the images of a whole evaluation.
            self.batches.append(batch.select(rows).to("cpu"))

    def is_chosen(self, batch: PackedBatch) -> Tensor:
        """Which sequences get an answer by the config: a mask."""
        settings = self.settings
        sample_S = batch.sequence_fields["sample"]
        if settings.max_samples is None:
            return torch.ones_like(sample_S, dtype=torch.bool)
        if self.engine.data.is_stream("eval"):  # of unknown length: the first ones
            return sample_S < settings.max_samples
        return torch.isin(sample_S, self._spread_samples.to(sample_S.device))

    @cached_property
    def _spread_samples(self) -> Tensor:
        """At most `max_samples` of the samples that an evaluation reads, evenly spread."""
        loader = self.engine._eval_loader
        samples: Tensor = loader.dataset.samples(loader.size)
        return samples[:: max(1, -(-len(samples) // self.settings.max_samples))]

    def answer(self, ctx: StepContext) -> None:
        """Complete the kept prompts into `engine.answers`, score them by source, and write `answers.jsonl`.

        All ranks call it, at the end of an evaluation.
        """
        if self.settings is None:
            return
        engine = self.engine
        engine.answers = []
        batches, self.batches = self.batches, []
        completions: list[tuple[Prompt, list[int]]] = []
        # Where ranks run one forward together, the others wait in it: then the job cannot continue.
        layout = engine.layout
        runs_alone = layout.data_size == engine.world.size and layout.shard_mesh is None
        with engine.keep_training(ctx, "generation", runs_alone):
            engine.answers = generate_answers(
                engine.model_engine,
                batches,
                engine.tokenizer,
                max_new_tokens=self.settings.max_new_tokens,
                prompt_tokens=self.settings.prompt_tokens,
                stop=engine.data.eos_token_ids,
                budget=engine.config.data.tokens_per_pack,
                keep=completions,
            )
        engine.after_generation(ctx, completions)
        names = engine.data.source_names("eval")
        with engine.keep_training(ctx, "score"):
            for i, name in enumerate(names):
                of_source = [answer for answer in engine.answers if answer.source == i]
                others = [answer for answer in engine.answers if answer.source != i]
                verdicts = engine.score(ctx, name, of_source)
                engine.answers = others + with_verdicts(of_source, verdicts)
        from mvp_engine.kit.examples import keep_media

        answers = self.gathered()
        with engine.keep_training(ctx, "writing answers.jsonl"):
            if engine.world.is_main:
                write_answers(engine.run.dir / "answers.jsonl", ctx.step, names, answers)
                keep_media(engine, answers)

    def gathered(self) -> list[Answer]:
        """The answers of all ranks, in the order of their samples."""
        has_answers = self.settings is not None and self.engine.layout.is_mp_src_rank
        gathered = self.engine.world.all_gather(list(self.engine.answers) if has_answers else [])
        return sorted(chain.from_iterable(gathered), key=lambda answer: answer.sample)


def log_exact_matches(ctx: StepContext, name: str, answers: Sequence[Answer]) -> None:
    """Log the share of answers that are the expected text. Continuations of plain text are never compared."""
    judged = [answer for answer in answers if not answer.is_continuation]
    if judged:
        ctx.log(f"exact_{name}", sum(answer.right for answer in judged), len(judged))


@contextmanager
def errors_as_warnings(
    engine: Any, ctx: StepContext, what: str, in_training: bool
) -> Iterator[None]:
    """A context for parts of an evaluation: while a training runs, an error inside of it is a warning."""
    try:
        yield
    except Exception as error:
        if not in_training:
            raise
        engine.logger.warning(
            "%s failed in the evaluation at step %d, which has no metrics of it; the training continues. %s: %s",
            what,
            ctx.step,
            type(error).__name__,
            error,
            exc_info=True,
        )
        best_metric = engine.config.checkpoint.best_metric
        if best_metric is not None:
            ctx.log(best_metric, 0.0, 0.0)  # without another value, its mean is None
