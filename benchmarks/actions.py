"""Training pi0 on one GPU: this engine from AV1 videos, and transformers' own forward with AdamW, in one run.

    PYTHONPATH=. python benchmarks/actions.py --out benchmarks/results/actions.json
    PYTHONPATH=. python benchmarks/actions.py --tiny    # tries it on a CPU

Each side is a process of its own. Both train all weights of a random pi0 in its real shape (3.5 B parameters) with
bf16 autocast over float32 weights and AdamW, on three cameras of 224 x 224 pixels, a prompt, a state and a chunk of 50
actions. Ours is the engine of recipes/table_vla on a LeRobot folder with AV1 videos, which the run writes first:
decoding and packing are part of its time. transformers gets one batch in GPU memory, again and again, and pays for no
data; it has no activation checkpointing, because its expert reads a cache that checkpointing turns off. `--ours` and
`--theirs` list what is tried: samples of a micro-batch, and for ours the activation checkpointing and the noise draws
per sample; the fastest of each side is compared. What does not fit is reported as out of memory. The first half of the
steps warms up. Random weights are drawn on the GPU. Each attempt is printed and written to `--out` when it ends, so
that one that fails or runs past `--limit` leaves the others. Without PyAV, or with `--codec png`, images are PNG in
parquet files.

MFU counts the FLOPs of one forward and backward (docs/mfu.md). `estimate_gib` is what `mvp plan` predicts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attempt import FOUND, attempt
from mvp_engine.files import atomic_path, atomic_write_text

SIDE = {False: 224, True: 16}  # pixels, by --tiny
CAMERAS = ("observation.images.left", "observation.images.right", "observation.images.wrist")
WORDS = ["put", "the", "red", "green", "blue", "block", "cup", "on", "plate", "left", "right", "and", "then", "stop"]
FRAMES = 60  # of an episode
os.environ.setdefault("SVT_LOG", "1")  # errors only


def model_config(tiny: bool) -> dict[str, Any]:
    """pi0's defaults are its real shape."""
    if not tiny:
        return {"model_type": "pi0"}
    text = {"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": SIDE[True]}
    vlm = {"model_type": "paligemma", "text_config": text, "image_token_id": 300, "projection_dim": 32}
    vlm["vision_config"] = {**vision, "vision_use_head": False, "projection_dim": 32}
    expert = {**text, "hidden_size": 16, "intermediate_size": 32}
    return {"model_type": "pi0", "vlm_config": vlm, "dit_config": expert, "chunk_size": 5}


def make(folder: Path, tiny: bool, episodes: int, codec: str | None = "libsvtav1") -> None:
    """A LeRobot folder with images of noise that moves, by default AV1 videos, and a tokenizer."""
    from mvp_engine.kit.actions.write import LeRobotWriter
    from mvp_engine.kit.tiny_processors import train_tokenizer

    train_tokenizer([" ".join(WORDS)] * 4, 290, ("<image>",)).save_pretrained(folder / "tokenizer")
    side = SIDE[tiny]
    sizes = {"observation.state": 14, "action": 14}
    dice = np.random.default_rng(0)
    cameras = dict.fromkeys(CAMERAS, (side, side))
    given = {"fps": 30, "sizes": sizes, "cameras": cameras, "codec": codec}
    with atomic_path(folder / "robot") as made, LeRobotWriter(made, **given) as writer:
        for _ in range(episodes):
            columns = {name: dice.standard_normal((FRAMES, size)).astype(np.float32) for name, size in sizes.items()}
            images = {camera: moving_noise(dice, side) for camera in CAMERAS}
            writer.add(columns, images, " ".join(dice.choice(WORDS, dice.integers(4, 12))))


def moving_noise(dice: np.random.Generator, side: int) -> np.ndarray:
    """Frames (FRAMES, side, side, 3): a coarse pattern that moves by a pixel each frame, and fine noise."""
    cells = max(1, side // 14)
    coarse = dice.integers(0, 255, (side // cells + 1, side // cells + 1, 3)).repeat(cells, 0).repeat(cells, 1)
    frames = [np.roll(coarse, i, axis=1)[:side, :side] for i in range(FRAMES)]
    return np.clip(np.stack(frames) + dice.integers(-8, 8, (FRAMES, side, side, 3)), 0, 255).astype(np.uint8)


# ---- Ours ---------------------------------------------------------------------------------------------------------


def tokens_of_a_sample(tiny: bool) -> int:
    """The images of three cameras, and room for the longest prompt."""
    from mvp_engine.hf.model.config_source import read_config

    vision = read_config(None, model_config(tiny)).vlm_config.vision_config
    return len(CAMERAS) * (vision.image_size // vision.patch_size) ** 2 + 32


def ours_config(folder: Path, args: argparse.Namespace, samples: int, mode: str, draws: int) -> Path:
    on_gpu = torch.cuda.is_available()
    config = {
        "engine": f"{Path(__file__).resolve().parent / 'actions_engine.py'}:BenchEngine",
        "processor": str(folder / "tokenizer"),
        "run_name": "pi0",
        "output_dir": str(folder / f"runs_{samples}_{mode}_{draws}"),
        "model": {"type": "action_model", "config": model_config(args.tiny), "activation_checkpointing": mode},
        "actions": {"draws": draws},
        "data": {
            "pack_tokens": samples * tokens_of_a_sample(args.tiny),
            "sources": {"robot": {"path": str(folder / "robot")}},
            "cache": str(folder / "costs"),
            "global_batch_size": 1,
            "num_workers": args.workers,
        },
        "train": {"max_steps": args.steps, "precision": "auto"},
        "optim": {"max_grad_norm": 1.0, "lr": 1e-5, "weight_decay": 0.0, "schedule": "constant"},
        "log": {"interval": max(1, args.steps // 2), "backends": ["jsonl", "terminal"]},
        "checkpoint": {"interval": None},
    }
    if not on_gpu:
        config["model"]["compile"] = None  # type: ignore[index]
    file = folder / f"ours_{samples}_{mode}_{draws}.yaml"
    file.write_text(json.dumps(config))
    return file


def ours(folder: Path, args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from mvp_engine.launch import launch

    samples, mode, draws = int(words[0]), words[1], int(words[2])
    file = ours_config(folder, args, samples, mode, draws)
    shutil.rmtree(folder / f"runs_{samples}_{mode}_{draws}", ignore_errors=True)
    started = time.perf_counter()
    code = launch(str(file), args.keys)  # in this process: importing everything again takes seconds
    if code:
        raise SystemExit(code)
    (log,) = (folder / f"runs_{samples}_{mode}_{draws}").glob("*/metrics.jsonl")
    record = [json.loads(line) for line in log.read_text().splitlines()][-1]
    perf = record["perf"]
    names = ("step_s", "data_wait", "memory_gib", "mfu")
    return {
        "samples_per_s": perf["samples_per_s"],
        "samples": samples,
        "activation_checkpointing": mode,
        "draws": draws,
        **{name: perf.get(name) for name in names},
        "fill": record.get("fill"),
        "loss": record["loss"],
        "run_s": time.perf_counter() - started,
        **estimated(file),
    }


def estimated(file: Path) -> dict[str, Any]:
    """What `mvp plan` predicts for the config. A failure must not lose what was measured."""
    from mvp_engine.cli import main

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main(["plan", str(file), "--gpu", name, "--json"])  # 2: it does not fit
        found = json.loads(text.getvalue())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - shown in the row
        return {"estimate_error": f"{type(error).__name__}: {error}"}
    return {
        "estimate_gib": found["peak_gib"],
        "estimate_memory": found["memory_gib"],
        "estimate_step_s": found["step_s"],
        "estimate_mfu": found["mfu"],
    }


# ---- transformers -------------------------------------------------------------------------------------------------


def theirs(folder: Path, args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from transformers import AutoConfig, PI0ForConditionalGeneration

    samples = int(words[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.for_model(**model_config(args.tiny))
    torch.manual_seed(0)
    with torch.device(device):
        model = PI0ForConditionalGeneration(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, weight_decay=0.0, fused=device == "cuda")
    batch = their_batch(config, samples, args.tiny, device)
    ends = []
    for _ in range(args.steps):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    half = max(1, args.steps // 2)
    step = (ends[-1] - ends[half - 1]) / max(1, args.steps - half)
    return {
        "samples_per_s": samples / step,
        "samples": samples,
        "step_s": step,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "loss": float(loss.detach()),
    }


def their_batch(config: Any, samples: int, tiny: bool, device: str) -> dict[str, Any]:
    """As `PI0Processor` makes it, with prompts padded to 48 tokens behind the images."""
    vision = config.vlm_config.vision_config
    images = len(CAMERAS) * (vision.image_size // vision.patch_size) ** 2
    ids = torch.randint(5, 250, (samples, images + 48), device=device)
    ids[:, :images] = config.vlm_config.image_token_id
    attended = torch.ones_like(ids)
    attended[:, images + 12 :] = 0
    side = SIDE[tiny]
    actions = (samples, config.chunk_size, config.max_action_dim)
    return {
        "input_ids": ids,
        "attention_mask": attended,
        "pixel_values": torch.randn(samples, len(CAMERAS), 3, side, side, device=device),
        "pixel_attention_mask": torch.ones(samples, len(CAMERAS), dtype=torch.bool, device=device),
        "state": torch.randn(samples, config.max_state_dim, device=device),
        "actions": torch.randn(actions, device=device),
    }


# ---- The run ------------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "av"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {"hardware": hardware, "versions": versions, "command": shlex.join(["python", *sys.argv])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--codec", default="libsvtav1", choices=("libsvtav1", "libx264", "png"))
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="of our config, to try others")
    parser.add_argument("--limit", type=float, help="seconds of one attempt")
    text = "samples:activation checkpointing:draws of each attempt"
    parser.add_argument("--ours", nargs="*", default=["16:none:1", "32:selective:1", "32:selective:4"], help=text)
    parser.add_argument("--theirs", nargs="*", default=["8", "16", "24"], help="samples of each attempt")
    parser.add_argument("--folder", help="keep the robot data there, for the next command")
    parser.add_argument("--inside", nargs=3, metavar=("SIDE", "TRIED", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        side, tried, folder = args.inside
        found = (ours if side == "ours" else theirs)(Path(folder), args, tried.split(":"))
        (Path(folder) / FOUND).write_text(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() if args.folder is None else contextlib.nullcontext(args.folder) as name:
        if args.ours and not (Path(name) / "robot").is_dir():
            started = time.perf_counter()
            make(Path(name), args.tiny, args.episodes, codec_of(args.codec))
            print(f"data: {time.perf_counter() - started:.1f} s", flush=True)
        for side, attempts in {"ours": args.ours, "transformers": args.theirs}.items():
            for tried in attempts:
                started = time.perf_counter()
                row = {"side": side} | attempt(__file__, side, tried, name, args.limit)
                rows.append(row | {"wall_s": time.perf_counter() - started})
                print(json.dumps(rows[-1]), flush=True)
                write(args, rows)


def codec_of(word: str) -> str | None:
    """The encoder of the videos; None: PNG images."""
    if word == "png" or importlib.util.find_spec("av") is None:
        return None
    return word


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Compare what is there so far; text goes to stdout, all figures to `--out`."""
    best = {}
    for side in ("ours", "transformers"):
        done = [row for row in rows if row["side"] == side and row.get("draws", 1) == 1 and "loss" in row]
        best[side] = max((row["samples_per_s"] for row in done), default=None)
    ratio = best["ours"] / best["transformers"] if all(best.values()) else None
    if ratio:
        print(f"ours / transformers: {ratio:.2f} x samples per second", flush=True)
    if args.out:
        atomic_write_text(args.out, json.dumps({**about(), "ratio": ratio, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
