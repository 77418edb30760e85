"""Check a data loader: each row once, correct tokens and loss masks, full packs, exact resume on other ranks.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.tools.skill_check import given, run_check

Make = Callable[[dict[str, Any], Any, int, int, Path], Any]
ROWS = 60
BUDGET = 256  # tokens of a pack
MIN_FILL = 0.9
MISSING_IMAGE = 7
BROKEN_JSON = 20
BAD = {"rows.jsonl:8": "missing_file", "rows.jsonl:21": "bad_json"}
MAX_LISTED = 6
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{{ p.text if p.type == 'text' "
    "else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_kit(settings: dict[str, Any], processor: Any, rank: int, world_size: int, folder: Path) -> Any:
    """The loader of the data kit: the reference that the check passes on."""
    kit = MLLMDataKit(MLLMData.model_validate(settings), processor)
    return kit.loader("train", rank=rank, world_size=world_size, seed=3, folder=folder)


@cache
def tiny_processor() -> Any:
    """A Qwen2.5-VL processor with a byte-level tokenizer."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    size: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    images = hf.Qwen2VLImageProcessor(**size)
    videos = hf.Qwen2VLVideoProcessor(**size)
    return hf.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def write_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Write the rows; returns the good ones by index. One bad row is not JSON, the image of the other is missing."""
    good = {}
    rng = np.random.default_rng(0)
    lines = []
    for i in range(ROWS):
        content = text(f"What is {i}?" + " Please." * (i % 5))
        if i % 3 == 1:
            content.insert(0, {"type": "image", "image": f"{i}.png"})
            if i != MISSING_IMAGE:
                pixels = rng.integers(0, 255, (16 + 4 * (i % 7), 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
        answers = [f"It is {i}, é."]
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": text(answers[0])}]
        if i % 2:
            answers.append("Sure." * (i % 4 + 1))
            chat.append({"role": "user", "content": text("Sure?")})
            chat.append({"role": "assistant", "content": text(answers[1])})
        lines.append("{broken" if i == BROKEN_JSON else json.dumps({"messages": chat}))
        if i not in (MISSING_IMAGE, BROKEN_JSON):
            good[i] = {"messages": chat, "with_loss": "".join(f"{answer}<|im_end|>" for answer in answers)}
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return good


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def problems(make: Make = with_kit) -> list[str]:
    """The problems of a loader, one sentence each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder)
        processor = tiny_processor()
        settings = {
            "sources": [{"path": str(folder / "rows.jsonl")}],
            "cache": str(folder / "cache"),
            "pack_tokens": BUDGET,
            "global_batch_tokens": 4 * BUDGET,
            "max_bad_rows": 0.1,
        }

        def loader(rank: int, world_size: int) -> Any:
            return make(settings, processor, rank, world_size, folder)

        epoch = list(loader(0, 1))
        found = _row_problems(epoch, rows, processor, folder) + _packing_problems(epoch)
        found += _resume_problems(loader, [_samples(batch) for batch in epoch])
        listed = [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text().splitlines()]
        reported = {record["where"]: record["reason"] for record in listed}
        if reported != BAD:
            found.append(f"the bad rows are {BAD}, but bad_rows.jsonl lists {reported}")
    return found


def _samples(batch: PackedBatch) -> list[int]:
    return batch.sequence_fields["sample"].tolist()


def _row_problems(batches: list[PackedBatch], rows: dict[int, Any], processor: Any, folder: Path) -> list[str]:
    """Rows that are lost or repeated, and rows with wrong tokens or labels."""
    found = list[str]()
    seen = Counter[int]()
    for batch in batches:
        seen.update(_samples(batch))
    if seen != Counter(rows.keys()):
        lost = sorted(rows.keys() - seen.keys())
        repeated = sorted(i for i, count in seen.items() if count > 1 or i not in rows)
        found.append(
            f"an epoch must have each good row once, but lost are {lost[:5]}, repeated or unknown are {repeated[:5]}"
        )
    for batch in batches:
        for s, sample in enumerate(_samples(batch)):
            if sample in rows:
                found += _sequence_problems(batch.select([s]), sample, rows[sample], processor, folder)
    return found[:MAX_LISTED]


def _sequence_problems(
    sequence: PackedBatch, sample: int, row: dict[str, Any], processor: Any, folder: Path
) -> list[str]:
    ids = _processor_ids(row["messages"], processor, folder)
    found = []
    if sequence.input_ids.tolist() != ids:
        found.append(f"row {sample}: {sequence.num_tokens} tokens, which are not the processor's own {len(ids)}")
    places = (sequence.labels != IGNORE).nonzero()[:, 0]
    labels = sequence.labels[places]
    if places.tolist() and labels.tolist() != sequence.input_ids[(places + 1) % len(ids)].tolist():
        return [*found, f"row {sample}: labels are not the next tokens"]
    with_loss = processor.tokenizer.decode(labels)
    if with_loss != row["with_loss"]:
        found.append(f"row {sample}: {with_loss!r} has loss, not {row['with_loss']!r}")
    return found


def _processor_ids(chat: list[dict[str, Any]], processor: Any, folder: Path) -> list[int]:
    images = []
    for message in chat:
        for part in message["content"]:
            if "image" in part:
                images.append(Image.open(folder / part["image"]))
    prompt = processor.apply_chat_template(chat, tokenize=False)
    return list(processor(text=[prompt], images=images or None)["input_ids"][0])


def _packing_problems(batches: list[PackedBatch]) -> list[str]:
    sizes = [batch.num_tokens for batch in batches]
    if max(sizes) > BUDGET:
        return [f"a pack has {max(sizes)} tokens; {BUDGET} are allowed"]
    fill = sum(sizes) / (len(sizes) * BUDGET)
    return [f"packs are {fill:.0%} full; {MIN_FILL:.0%} is possible"] if fill < MIN_FILL else []


def _resume_problems(loader: Callable[[int, int], Any], packs: list[list[int]]) -> list[str]:
    """Two ranks must alternate over the packs of one; after two steps, four ranks must resume at the next pack."""
    found = list[str]()
    two = [loader(rank, 2) for rank in range(2)]
    started = [list(islice(iter(one), 4)) for one in two]
    done = [_samples(started[i % 2][i // 2]) for i in range(8)]
    if done != packs[:8]:
        found.append("two ranks together do not have the packs of one rank, in turn")
    four = [loader(rank, 4) for rank in range(4)]
    for one in four:
        one.load_state_dict(two[0].state_dict())
    rest = [[_samples(batch) for batch in one] for one in four]
    resumed = []
    if rest[0]:
        total = sum(len(one) for one in rest)
        resumed = [rest[i % 4][i // 4] for i in range(total)]
    if resumed != packs[8:]:
        repeated = sorted(_rows_of(resumed) & _rows_of(done))
        found.append(f"after a resume the rows are not the remaining ones: {repeated[:5]} are repeated")
    return found


def _rows_of(packs: list[list[int]]) -> set[int]:
    return {row for pack in packs for row in pack}


if __name__ == "__main__":
    run_check(lambda: problems(given(with_kit, "the loader", "loader")))
