"""Does a loader give each row once, rightly masked, and resume exactly? `check.py [FILE.py:NAME]`; see SKILL.md."""

from __future__ import annotations

import json
import sys
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
from mvp_engine.imports import load_spec
from mvp_engine.kit import MLLMData, MLLMDataKit

Make = Callable[[dict[str, Any], Any, int, int, Path], Any]
ROWS, BUDGET = 60, 256
BAD = {"rows.jsonl:8": "missing_file", "rows.jsonl:21": "bad_json"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{{ p.text if p.type == 'text' "
    "else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_kit(settings: dict[str, Any], processor: Any, rank: int, world_size: int, folder: Path) -> Any:
    """What the skill says, in one line."""
    kit = MLLMDataKit(MLLMData.model_validate(settings), processor)
    return kit.loader("train", rank=rank, world_size=world_size, seed=3, folder=folder)


@cache
def tiny_processor() -> Any:
    """Qwen2.5-VL's, on bytes."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    size: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    pictures, films = hf.Qwen2VLImageProcessor(**size), hf.Qwen2VLVideoProcessor(**size)
    return hf.Qwen2_5_VLProcessor(pictures, tokenizer, films, chat_template=TEMPLATE)


def write_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """The good rows by number. One of the bad ones is no JSON, of the other the picture is not there."""
    rows, rng = {}, np.random.default_rng(0)
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as out:
        for i in range(ROWS):
            content: list[dict[str, Any]] = [{"type": "text", "text": f"What is {i}?" + " Please." * (i % 5)}]
            if i % 3 == 1:
                name = "gone.png" if i == 7 else f"{i}.png"
                if i != 7:
                    drawn = rng.integers(0, 255, (16 + 4 * (i % 7), 24, 3), dtype=np.uint8)
                    Image.fromarray(drawn).save(folder / name)
                content.insert(0, {"type": "image", "image": name})
            answers = [f"It is {i}, é.", "Sure." * (i % 4 + 1)]
            chat = [{"role": "user", "content": content}, {"role": "assistant", "content": text(answers[0])}]
            if i % 2:
                chat += [{"role": "user", "content": text("Sure?")}, {"role": "assistant", "content": text(answers[1])}]
            out.write("{broken\n" if i == 20 else json.dumps({"messages": chat}) + "\n")
            if i not in (7, 20):
                rows[i] = {"messages": chat, "learnt": "".join(f"{a}<|im_end|>" for a in answers[: 1 + i % 2])}
    return rows


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def problems(make: Make = with_kit) -> list[str]:
    """What is wrong with a loader, in words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, processor = write_rows(folder), tiny_processor()
        settings = {"sources": [{"path": str(folder / "rows.jsonl")}], "cache": str(folder / "cache")}
        settings |= {"micro_batch_tokens": BUDGET, "global_batch_tokens": 4 * BUDGET, "max_bad_fraction": 0.1}

        def loader(rank: int, world_size: int) -> Any:
            return make(settings, processor, rank, world_size, folder)

        whole = list(loader(0, 1))
        wrong = _content(whole, rows, processor, folder) + _packing(whole)
        wrong += _ranks_and_resume(loader, [_samples(batch) for batch in whole])
        listed = [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text().splitlines()]
        if (named := {one["where"]: one["reason"] for one in listed}) != BAD:
            wrong.append(f"bad rows are {BAD}, but bad_rows.jsonl says {named}")
    return wrong


def _samples(batch: PackedBatch) -> list[int]:
    return batch.sequence_fields["sample"].tolist()


def _content(batches: list[PackedBatch], rows: dict[int, Any], processor: Any, folder: Path) -> list[str]:
    wrong, seen = list[str](), Counter(sample for batch in batches for sample in _samples(batch))
    if seen != Counter(rows.keys()):
        lost, odd = sorted(rows.keys() - seen.keys()), sorted(i for i, n in seen.items() if n > 1 or i not in rows)
        wrong.append(f"an epoch has each good row once, but lost are {lost[:5]}, twice or unknown are {odd[:5]}")
    for batch in batches:
        for s, sample in enumerate(_samples(batch)):
            one = batch.select([s])
            row = rows.get(sample)
            if row is None:
                continue
            chat, names = row["messages"], [b["image"] for m in row["messages"] for b in m["content"] if "image" in b]
            shown = processor.apply_chat_template(chat, tokenize=False)
            images = [Image.open(folder / name) for name in names] or None
            own = processor(text=[shown], images=images)["input_ids"][0]
            if one.input_ids.tolist() != list(own):
                wrong.append(f"row {sample}: {one.num_tokens} tokens, which are not the processor's own {len(own)}")
            places = (one.labels != IGNORE).nonzero()[:, 0]
            if places.tolist() and one.labels[places].tolist() != one.input_ids[(places + 1) % len(own)].tolist():
                wrong.append(f"row {sample}: labels are not the tokens that come next")
            elif (said := processor.tokenizer.decode(one.labels[places])) != row["learnt"]:
                wrong.append(f"row {sample}: {said!r} is learnt, not {row['learnt']!r}")
    return wrong[:6]


def _packing(batches: list[PackedBatch]) -> list[str]:
    sizes = [batch.num_tokens for batch in batches]
    if max(sizes) > BUDGET:
        return [f"a pack has {max(sizes)} tokens; {BUDGET} are allowed"]
    fill = sum(sizes) / (len(sizes) * BUDGET)
    return [f"packs are {fill:.0%} full; 90 % is easy here"] if fill < 0.9 else []


def _ranks_and_resume(loader: Callable[[int, int], Any], packs: list[list[int]]) -> list[str]:
    """Two ranks take turns at the packs of a step; stopped after two steps, four ranks go on where they were."""
    wrong, half, done = list[str](), [loader(rank, 2) for rank in range(2)], []
    begun = [list(islice(iter(one), 4)) for one in half]
    done = [_samples(begun[i % 2][i // 2]) for i in range(8)]
    if done != packs[:8]:
        wrong.append("two ranks do not have the packs of one, in turns")
    after = [loader(rank, 4) for rank in range(4)]
    for one in after:
        one.load_state_dict(half[0].state_dict())
    rest = [[_samples(batch) for batch in one] for one in after]
    found = [rest[i % 4][i // 4] for i in range(sum(map(len, rest)))] if rest[0] else []
    if found != packs[8:]:
        again = sorted({i for pack in found for i in pack} & {i for pack in done for i in pack})
        wrong.append(f"after a resume the rows are not those that were left: {again[:5]} come again")
    return wrong


def main(words: list[str]) -> int:
    mine: Make = with_kit
    if words:
        module, name = load_spec(words[0], Path.cwd(), "the loader")
        mine = getattr(module, name or "loader")
    wrong = problems(mine)
    print("\n".join(wrong) or "ok")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
