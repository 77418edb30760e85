"""DPO on one GPU: this engine and TRL's DPOTrainer with Liger's kernels, in one run, on the same rows from files.

    PYTHONPATH=. python benchmarks/preference.py --out benchmarks/results/dpo_text.json
    PYTHONPATH=. python benchmarks/preference.py --images --out benchmarks/results/dpo_images.json
    PYTHONPATH=. python benchmarks/preference.py --shape tiny --pairs 4 --steps 4    # tries it on a CPU

Each side is a process of its own. Both train all weights of the same random model (bf16 autocast over float32 weights)
against a frozen copy of it, with AdamW, on the same number of pairs per step: prompts of 32 to 1,024 words, answers of
8 to 256, and with `--images` one image of 448 x 448 pixels per pair. Ours packs the pairs and encodes an image once;
TRL pads `--batch` pairs. Rows are read from a jsonl (ours) and from an Arrow dataset (TRL). The first half of the steps
warms up and does not count. `padding` is the share of the tokens of a batch that are padding.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SIDES = ("ours", "TRL + Liger")
VOCABULARY = 2048
SIDE = 448  # of an image, in pixels
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_1_7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY},
}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_1_7b": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16},
    "tiny": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
}


def model_config(shape: str, images: bool) -> dict[str, Any]:
    """Qwen3, or Qwen3-VL with an encoder as that of its 2B model."""
    text = SHAPES[shape]
    if not images:
        return {"model_type": "qwen3", "tie_word_embeddings": True, **text}
    half = text["head_dim"] // 2
    axes = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": axes}
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0, 1], **VISION[shape]}
    tokens = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    inner = {**text, "rope_parameters": rope}
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": inner,
        "vision_config": vision,
    } | tokens


def make(folder: Path, shape: str, images: bool, pairs: int) -> None:
    """Write rows.jsonl, images, the processor and the weights of the model that both sides start from."""
    import numpy as np
    from PIL import Image
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor, train_tokenizer

    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 7))) for _ in range(600)]

    def text(low: int, high: int) -> str:
        return " ".join(dice.choices(words, k=int(low * (high / low) ** dice.random())))

    texts = [" ".join(words)] * 4
    processor: Any = make_qwen3_vl_processor(texts, VOCABULARY, 16) if images else train_tokenizer(texts, VOCABULARY)
    if images:
        processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
        (folder / "pictures").mkdir()
    processor.save_pretrained(folder / "model")
    with open(folder / "rows.jsonl", "w") as file:
        for i in range(pairs):
            row: dict[str, Any] = {"prompt": text(32, 1024), "chosen": text(8, 256), "rejected": text(8, 256)}
            if images:
                row["prompt"] = "<image>" + row["prompt"]
                row["images"] = [f"pictures/{i:05d}.png"]
                noise = np.random.default_rng(i).integers(0, 255, (28, 28, 3), np.uint8)
                Image.fromarray(noise).resize((SIDE, SIDE)).save(folder / row["images"][0])
            file.write(json.dumps(row) + "\n")
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(AutoConfig.for_model(**model_config(shape, images)))
    model.to("cpu").save_pretrained(folder / "model")


def ours(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The shipped preference engine and its data kit, by a config file."""
    config = {
        "engine": "preference",
        "run_name": "dpo",
        "output_dir": str(folder / "runs"),
        "model": {
            "type": "language_model",
            "path": str(folder / "model"),
            "compile": args.compile if torch.cuda.is_available() else None,
        },
        "preference": {"loss": "dpo", "beta": 0.1, "reference": "copy"},
        "data": {
            "pairs": True,
            "pack_tokens": args.tokens,
            "sources": {"pairs": {"path": str(folder / "rows.jsonl")}},
            "cache": str(folder / "costs"),
            "global_batch_size": args.packs,
        },
        "train": {"max_steps": args.steps, "precision": "auto"},
        "optim": {"lr": 1e-6, "weight_decay": 0.0, "schedule": "constant"},
        "log": {"interval": args.steps // 2, "backends": ["jsonl"]},
        "checkpoint": {"interval": None},
    }
    if args.checkpointing:
        config["model"]["activation_checkpointing"] = "selective"  # type: ignore[index]
    file = folder / "dpo.yaml"
    file.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "mvp_engine.launch", "--config", str(file)], check=True)
    (log,) = (folder / "runs").glob("*/metrics.jsonl")
    record = [json.loads(line) for line in log.read_text().splitlines()][-1]
    perf = record["perf"]
    return {
        "pairs_per_s": perf["samples_per_s"],
        "step_s": perf["step_s"],
        "data_wait": perf["data_wait"],
        "memory_gib": perf.get("memory_gib"),
        "padding": 0.0,
        "loss": record["loss"],
    }


def theirs(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's DPOTrainer; the reference is a second model, its own default."""
    from datasets import Dataset, Image, Sequence
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import DPOConfig, DPOTrainer

    ends: list[float] = []
    filled: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    class Counted(DPOTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
            filled.append(float(inputs["attention_mask"].float().mean()))
            return super().training_step(model, inputs, *rest, **more)

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    names = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    chats: list[dict[str, Any]] = []
    for row in rows:
        chat = {n: [{"role": r, "content": row[n].removeprefix("<image>")}] for n, r in names.items()}
        chats.append(chat | ({"images": [str(folder / p) for p in row["images"]]} if args.images else {}))
    dataset = Dataset.from_list(chats)
    if args.images:
        dataset = dataset.cast_column("images", Sequence(Image()))
    auto: Any = AutoModelForImageTextToText if args.images else AutoModelForCausalLM
    on_gpu = torch.cuda.is_available()
    models = [auto.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2)]
    arguments = DPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=max(1, args.pairs // args.batch),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_liger_kernel=on_gpu,
        gradient_checkpointing=args.checkpointing,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_length=None,
        logging_steps=args.steps // 2,
        dataloader_num_workers=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    load: Any = AutoProcessor if args.images else AutoTokenizer
    processor = load.from_pretrained(folder / "model")
    trainer = Counted(models[0], models[1], args=arguments, train_dataset=dataset, processing_class=processor)
    trainer.add_callback(Clock())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    half = args.steps // 2
    step = (ends[-1] - ends[half - 1]) / (args.steps - half)
    pairs = args.batch * arguments.gradient_accumulation_steps
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {
        "pairs_per_s": pairs / step,
        "step_s": step,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "padding": 1 - sum(filled) / len(filled),
        "loss": losses[-1],
    }


def about() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "liger-kernel", "datasets"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    command = shlex.join(["python", *sys.argv])
    return {"hardware": hardware, "versions": versions, "command": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--shape", default="qwen3_1_7b", choices=SHAPES)
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=32, help="pairs of a step of TRL; ours has about as many")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of our packs")
    parser.add_argument("--packs", type=int, default=2, help="our packs per step")
    parser.add_argument("--batch", type=int, default=4, help="pairs that TRL computes at once")
    parser.add_argument("--compile", default="auto", help="torch.compile backend of our blocks")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing, on both sides")
    parser.add_argument("--inside", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        side, folder = args.inside
        found = (ours if side == "ours" else theirs)(Path(folder), args)
        (Path(folder) / "found.json").write_text(json.dumps(found))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, args.shape, args.images, 2 * args.pairs * args.steps)
        for side in args.sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--inside", side, name]
            subprocess.run(command, check=True)
            rows.append({"side": side, **json.loads((folder / "found.json").read_text())})
            print(rows[-1], flush=True)
    if len(rows) == 2:
        print(f"ours / TRL: {rows[0]['pairs_per_s'] / rows[1]['pairs_per_s']:.2f} x pairs per second")
    if args.out:
        args.out.write_text(json.dumps({**about(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
