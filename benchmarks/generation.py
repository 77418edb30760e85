"""Generation on one GPU: without a KV cache, with one, and by transformers' `generate`; and its share of a training.

    PYTHONPATH=. python benchmarks/generation.py --out benchmarks/results/generation.json
    PYTHONPATH=. python benchmarks/generation.py --shape tiny --prompts 4 --new 8 --held 64    # tries it on a CPU
    python benchmarks/generation.py --table benchmarks/results/generation.json    # into docs/performance.md

Random weights, and prompts of random tokens with 64 to 1,024 tokens. Nothing stops early: every completion has `--new`
tokens. Our sides run in the model engine of a training: float32 weights, bf16 autocast. transformers has bf16 weights,
SDPA and prompts padded on the left. `same tokens` is in float32, for all sides alike, on the first prompts.

The share is that of evaluation by generation in a training with recipes/qwen3/configs/sft_gpu1.yaml: its packs, steps
between evaluations, share of the held-out rows and new tokens. `--held` rows are held out. Steps are timed with AdamW
and compiled blocks, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings, precision_on

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "recipes/qwen3/configs/sft_gpu1.yaml"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_1_7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
PAD = 0
Tokens = list[list[int]]


def config_of(shape: str) -> dict[str, Any]:
    return {"model_type": "qwen3", "tie_word_embeddings": True, "pad_token_id": PAD, **SHAPES[shape]}


def make_prompts(count: int, vocabulary: int) -> list[torch.Tensor]:
    """Random tokens, 64 to 1,024 each."""
    dice = random.Random(0)
    noise = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocabulary, (dice.randint(64, 1024),), generator=noise) for _ in range(count)]


def build_engine(shape: str, device: torch.device, precision: str, trains: bool) -> LanguageModelEngine:
    settings = Settings(precision=precision, compile="inductor" if trains and device.type == "cuda" else None)
    model = LanguageModelEngine.build_model(ModelSource(None, config_of(shape)))
    engine = LanguageModelEngine(model, Layout(World(0, 1, 0, 1, device)), settings)
    is_fused = device.type == "cuda"
    engine.initialize(
        (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_fused)) if trains else None
    )
    return engine


def transformers_model(engine: LanguageModelEngine, shape: str, dtype: torch.dtype) -> Any:
    """transformers' model with the weights of our engine."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(shape), attn_implementation="sdpa")
    with engine.world.device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name.replace("_orig_mod.", ""): value for name, value in engine.model.hf.state_dict().items()}
    model.load_state_dict(state)
    return model.eval()


def ours(engine: LanguageModelEngine, prompts: list[torch.Tensor], new: int, **options: Any) -> Tokens:
    batch = PackedBatch.from_sequences(prompts)
    return [one.tokens for one in complete(engine, batch, Decoding(new, **options))]


def theirs(model: Any, prompts: list[torch.Tensor], new: int) -> Tokens:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    for row, prompt in zip(ids, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
    given = {"input_ids": ids.to(model.device), "attention_mask": (ids != PAD).to(model.device)}
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": PAD}
    with torch.no_grad():
        return model.generate(**given, **options)[:, longest:].tolist()


def measured(generate: Callable[[int], Tokens], new: int, device: torch.device) -> dict[str, Any]:
    generate(4)  # warms up
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    tokens = generate(new)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "tokens_per_s": len(tokens) * new / seconds, "ms_per_token": 1e3 * seconds / new}
    if device.type == "cuda":
        found["memory_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def same_tokens(shape: str, device: torch.device, prompts: list[torch.Tensor], new: int) -> dict[str, float]:
    """The share of tokens, in float32, that equal those of transformers."""
    engine = build_engine(shape, device, "fp32", trains=False)
    expected = theirs(transformers_model(engine, shape, torch.float32), prompts, new)
    found = {"no cache": ours(engine, prompts, new, use_cache=False), "KV cache": ours(engine, prompts, new)}
    return {side: share_equal(tokens, expected) for side, tokens in found.items()}


def share_equal(found: Tokens, expected: Tokens) -> float:
    flat = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in flat) / len(flat)


def evaluation_share(engine: LanguageModelEngine, vocabulary: int, held: int, steps: int, packs: int) -> dict[str, Any]:
    """Seconds of a training step and of the generation in an evaluation, with the recipe's settings."""
    settings = yaml.safe_load(SETTINGS.read_text())
    tokens = settings["data"]["max_length"]  # of a pack, which `auto` may make larger
    generation = settings["eval.generation"]
    interval = settings["eval"]["steps"]
    rows = torch.randint(1, vocabulary, (packs, 8, tokens // 8), generator=torch.Generator().manual_seed(1))
    micro_batches = [PackedBatch.from_sequences(list(pack)) for pack in rows]

    def forward_step(micro_batch: PackedBatch) -> tuple[torch.Tensor, Any]:
        return engine.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

    def train(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            engine.train_batch(micro_batches, forward_step)
            engine.step_status()  # waits for the device
        return time.perf_counter() - start

    engine.model.train()
    train(min(3, steps))  # warms up, compiles
    step_s = train(steps) / steps
    prompts = make_prompts(min(held, generation["max_samples"]), vocabulary)
    ours(engine, prompts, 4, budget=tokens)
    start = time.perf_counter()
    ours(engine, prompts, generation["max_new_tokens"], budget=tokens)
    generation_s = time.perf_counter() - start
    between_s = interval * step_s
    return {
        "settings": str(SETTINGS.relative_to(ROOT)),
        "held_out_rows": held,
        "answers": len(prompts),
        "new_tokens": generation["max_new_tokens"],
        "eval_interval": interval,
        "tokens_per_step": packs * tokens,
        "step_s": step_s,
        "generation_s": generation_s,
        "share": generation_s / (generation_s + between_s),
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| side | seconds | tokens/s | ms per token | memory | same tokens |", "| --- |" + " ---: |" * 5]
    for row in result["rows"]:
        memory = f"{row['memory_gib']:.1f} GiB" if "memory_gib" in row else "-"
        same = f"{100 * row['same_tokens']:.1f} %" if "same_tokens" in row else "-"
        shown = [f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['ms_per_token']:.1f}", memory, same]
        lines.append(f"| {row['side']} | {' | '.join(shown)} |")
    share = result.get("evaluation")
    if share:
        text = (
            f"Evaluation by generation, `{share['settings']}`: {share['answers']} answers of "
            f"{share['new_tokens']} tokens take {share['generation_s']:.1f} s, the {share['eval_interval']} steps "
            f"before them {share['eval_interval'] * share['step_s']:.0f} s: {100 * share['share']:.2f} % of the "
            "training."
        )
        lines += ["", *textwrap.wrap(text, 120)]
    return "\n".join(lines)


def into_page(result: dict[str, Any], page: Path) -> None:
    marks = r"(<!-- generation -->\n).*?(<!-- /generation -->)"
    shown = re.sub(marks, lambda found: f"{found[1]}{table(result)}\n{found[2]}", page.read_text(), flags=re.DOTALL)
    page.write_text(shown)


def about(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {name: version(name) for name in ("torch", "transformers")}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU {platform.machine()}"
    command = shlex.join(["python", "benchmarks/generation.py", *sys.argv[1:]])
    return {"hardware": hardware, "versions": versions, "command": command}


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    prompts = make_prompts(args.prompts, SHAPES[args.shape]["vocab_size"])
    result = timed(args, device, prompts)
    compared = prompts[: args.same_prompts]
    same = same_tokens(args.shape, device, compared, min(args.new, 64)) if compared else {}
    for row in result["rows"]:
        if row["side"] in same:
            row["same_tokens"] = same[row["side"]]
    return result


def timed(args: argparse.Namespace, device: torch.device, prompts: list[torch.Tensor]) -> dict[str, Any]:
    engine = build_engine(args.shape, device, precision_on(device, "auto"), trains=True)
    model = transformers_model(engine, args.shape, torch.bfloat16 if device.type == "cuda" else torch.float32)
    sides: dict[str, Callable[[int], Tokens]] = {
        "no cache": lambda new: ours(engine, prompts, new, use_cache=False),
        "KV cache": lambda new: ours(engine, prompts, new),
        "transformers": lambda new: theirs(model, prompts, new),
    }
    result: dict[str, Any] = {"shape": args.shape, "rows": []}
    for side in args.sides:
        row = {"side": side, "prompts": args.prompts, "new_tokens": args.new}
        result["rows"].append(row | measured(sides[side], args.new, device))
        print(result["rows"][-1], file=sys.stderr, flush=True)
    if args.held:
        vocabulary = SHAPES[args.shape]["vocab_size"]
        result["evaluation"] = evaluation_share(engine, vocabulary, args.held, args.steps, args.packs)
        print(result["evaluation"], file=sys.stderr, flush=True)
    return result


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--table", type=Path, help="only put the table of this JSON into docs/performance.md")
    parser.add_argument("--shape", default="qwen3_1_7b", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=256, help="tokens of each completion")
    sides = ("no cache", "KV cache", "transformers")
    parser.add_argument("--sides", nargs="*", default=list(sides), choices=sides)
    parser.add_argument("--same-prompts", type=int, default=4, help="compared in float32; 0: none")
    parser.add_argument("--held", type=int, default=512, help="held-out rows of the training; 0: no share")
    parser.add_argument("--steps", type=int, default=5, help="training steps that are timed")
    sizes = yaml.safe_load(SETTINGS.read_text())["data"]
    packs = sizes["global_batch_tokens"] // sizes["max_length"]
    parser.add_argument("--packs", type=int, default=packs, help="of a training step (default: the recipe's)")
    args = parser.parse_args(words)
    if args.table:
        into_page(json.loads(args.table.read_text()), ROOT / "docs" / "performance.md")
        return
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    result = {**about(device), **measure(args, device)}
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
