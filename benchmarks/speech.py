"""Training a talker on one GPU: Qwen3-Omni's in its real shape, on synthetic speech of 2 to 30 seconds.

    PYTHONPATH=. python benchmarks/speech.py --out benchmarks/results/speech.json
    PYTHONPATH=. python benchmarks/speech.py --tiny    # tries it on a CPU

What is measured, each in a process of its own:

- `train`: `MLLMEngine` with `model.type=omni_model`, talker SFT: the thinker is frozen, and since rows are text its
  blocks do not run (it has one layer here, and its whole embedding). Rows have codes of 2 to 30 s at 12.5 frames per
  second. Frames per second, MFU (the FLOPs of talker and code predictor by formula, and the log's own where it has
  one), peak memory, and what `mvp estimate` predicts. `--tried` lists pack sizes and activation checkpointing.
- `predictor`: forward and backward of the code predictor on the same frames, in one pass over 16 positions, and in 15
  passes of growing length, as `generate` runs it.
- `sync`: a forward and backward under `torch.cuda.set_sync_debug_mode("error")`.
- `mimi`: encoding of waveforms of 2 to 30 s to 16 codebooks by a random Mimi, as a multiple of real time.

The first half of the steps warms up.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attempt import FOUND, attempt

FRAME_RATE = 12.5
WORDS = "the a of to and in is you that it he was for on are as with his they at be this have from or one".split()  # noqa: SIM905
TTS = ("<tts_pad>", "<tts_bos>", "<tts_eos>")
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def tokenizer() -> Any:
    from mvp_engine.kit.tiny_processors import word_tokenizer

    return word_tokenizer(["say", *WORDS], TTS)


def model_config(tiny: bool) -> dict[str, Any]:
    """Qwen3-Omni-30B-A3B's talker, code predictor and embeddings; the thinker's blocks are one layer."""
    ids = tokenizer().get_vocab()
    talker: dict[str, Any] = {
        "num_code_groups": 16,
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 1,
        "codec_eos_token_id": 2150,
        "codec_bos_id": 2149,
        "codec_pad_id": 2148,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302},
        "text_config": {"vocab_size": 3072, "shared_expert_intermediate_size": 768, "num_experts_per_tok": 6},
        "code_predictor_config": {"num_code_groups": 16},
    }
    talker["text_config"]["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [24, 20, 20],
        "interleaved": True,
    }
    talker["text_config"]["head_dim"] = 128
    text: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 152_064, "hidden_size": 2048}
    thinker = {
        "text_config": text,
        "vision_config": {"depth": 1, "deepstack_visual_indexes": [0], "out_hidden_size": 2048},
        "audio_config": {"encoder_layers": 1, "num_hidden_layers": 1, "output_dim": 2048},
    }
    vocoder: dict[str, Any] = {"num_hidden_layers": 1, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}
    if tiny:
        small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        own = {**small, **experts, "head_dim": 8, "rope_parameters": rope}
        thinker["text_config"] = {**own, "num_hidden_layers": 1, "vocab_size": 64}
        thinker["vision_config"] |= {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        thinker["audio_config"] |= {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
        thinker["audio_config"] |= {"output_dim": 32, "downsample_hidden_size": 8, "num_mel_bins": 16}
        talker["text_config"] |= {**own, "num_hidden_layers": 2, "shared_expert_intermediate_size": 16}
        talker["code_predictor_config"] |= {**small, "head_dim": 8, "num_hidden_layers": 1}
        talker["thinker_hidden_size"] = 32
        vocoder |= {**small, "decoder_dim": 32}
    return {
        "model_type": "qwen3_omni_moe",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_bos>"],
        "tts_eos_token_id": ids["<tts_eos>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": vocoder,
    }


def seconds(dice: np.random.Generator, count: int, tiny: bool) -> list[float]:
    """Lengths of sounds: log-uniform from 2 to 30 seconds."""
    longest = 4.0 if tiny else 30.0
    return np.exp(dice.uniform(np.log(2.0), np.log(longest), count)).tolist()


def make_rows(folder: Path, count: int, tiny: bool) -> None:
    """Chats of about three words per second, and their codes."""
    dice = np.random.default_rng(0)
    (folder / "codes").mkdir()
    with (folder / "rows.jsonl").open("w") as rows:
        for i, length in enumerate(seconds(dice, count, tiny)):
            codes = dice.integers(0, 2048, (round(length * FRAME_RATE), 16))
            np.save(folder / "codes" / f"{i}.npy", codes)
            text = " ".join(dice.choice(WORDS, round(3 * length)))
            answer = [{"type": "text", "text": text}, {"type": "audio", "codes": f"codes/{i}.npy"}]
            question = " ".join(dice.choice(WORDS, 20))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": messages}) + "\n")
    tokenizer().save_pretrained(folder / "tokenizer")


# ---- Training -----------------------------------------------------------------------------------------------------


def train(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    tokens, mode = tried.split(":")
    config = {
        "engine": "mvp_engine.kit.mllm:MLLMEngine",
        "processor": str(folder / "tokenizer"),
        "project": {"name": "speech", "dir": str(folder / f"runs_{tokens}_{mode}")},
        "model": {
            "type": "omni_model",
            "config": model_config(args.tiny),
            "freeze": ["vision", "audio", "projector", "llm"],
            "activation_checkpointing": {"talker": mode},
        },
        "mllm": {
            "micro_batch_tokens": int(tokens),
            "sources": {"rows": {"path": str(folder / "rows.jsonl")}},
            "cache": str(folder / "costs"),
            "speech": {"books": 16, "require": True},
        },
        "data": {"micro_batch_size": 1, "global_batch_size": 1, "num_workers": args.workers},
        "loop": {"total_steps": args.steps, "precision": "auto", "clip_grad_norm": 1.0},
        "optim": {"lr": 1e-5, "weight_decay": 0.0, "schedule": "constant"},
        "log": {"interval": max(1, args.steps // 2), "backends": ["jsonl", "terminal"]},
        "checkpoint": {"interval": None},
    }
    file = folder / f"train_{tokens}_{mode}.yaml"
    file.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "mvp_engine.launch", "--config", str(file)], check=True)
    (log,) = (folder / f"runs_{tokens}_{mode}").glob("*/metrics.jsonl")
    record = [json.loads(line) for line in log.read_text().splitlines()][-1]
    perf = record["perf"]
    frames = perf.get("frames_per_s")
    found = {name: perf.get(name) for name in ("step_s", "data_wait", "memory_gib", "mfu")}
    found |= {"frames_per_s": frames, "real_time": frames and frames / FRAME_RATE, "fill": record.get("fill")}
    estimate = estimated(file)
    found |= {"estimate_gib": estimate.get("peak_gib"), "estimate_step_s": estimate.get("step_s")}
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if ON_GPU else None
    if peak and frames:
        found["mfu_by_formula"] = frames * flops_per_frame(folder, args.tiny, int(tokens)) / peak
    return found


def estimated(file: Path) -> dict[str, Any]:
    """What `mvp estimate` predicts for the config; it exits with 2 where that does not fit."""
    name = torch.cuda.get_device_name() if ON_GPU else "H200"
    command = [sys.executable, "-m", "mvp_engine.cli", "estimate", str(file), "--gpu", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return {}
    return found


def flops_per_frame(folder: Path, tiny: bool, tokens: int) -> float:
    """FLOPs of forward and backward of talker and predictor, per frame of the rows of one pack.

    Matmuls count 6 times their active weights for each row; causal attention 6 times pairs times hidden size of the
    heads, twice (scores and values).
    """
    batch = one_batch(folder, tiny, tokens)
    speech = batch.media["speech"]
    lengths = speech.row_counts.double()
    frames = float(speech.fields["frame_counts"].sum())
    config = model_config(tiny)["talker_config"]
    from mvp_engine.hf.config_source import read_config

    talker = read_config(None, model_config(tiny)).talker_config
    text, predictor = talker.text_config, talker.code_predictor_config
    heads = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    experts = text.num_experts_per_tok * text.moe_intermediate_size + config["text_config"].get(
        "shared_expert_intermediate_size", 0
    )
    layer = text.hidden_size * (2 * heads + 2 * keys) + 3 * text.hidden_size * experts
    projection = (talker.thinker_hidden_size + text.hidden_size) * text.intermediate_size
    rows = float(lengths.sum())
    total = 6 * rows * (text.num_hidden_layers * layer + projection)
    total += 6 * (frames + len(lengths)) * text.hidden_size * text.vocab_size
    total += 6 * text.num_hidden_layers * heads * float((lengths * (lengths + 1)).sum())
    books = talker.num_code_groups
    heads = predictor.num_attention_heads * predictor.head_dim
    keys = predictor.num_key_value_heads * predictor.head_dim
    layer = predictor.hidden_size * (2 * heads + 2 * keys) + 3 * predictor.hidden_size * predictor.intermediate_size
    total += 6 * frames * books * predictor.num_hidden_layers * layer
    total += 6 * frames * (books - 1) * predictor.hidden_size * predictor.vocab_size
    total += 6 * predictor.num_hidden_layers * heads * frames * books * (books + 1)
    return total / frames


# ---- Parts --------------------------------------------------------------------------------------------------------


def one_batch(folder: Path, tiny: bool, tokens: int) -> Any:
    from mvp_engine.hf.config_source import read_config
    from mvp_engine.kit import MLLMData, MLLMDataKit

    values = {
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "micro_batch_tokens": tokens,
        "cache": str(folder / "costs"),
        "speech": {"books": 16, "require": True},
    }
    config = read_config(None, model_config(tiny))
    kit = MLLMDataKit(MLLMData.model_validate(values), tokenizer(), model_config=config)
    return next(iter(kit.loader("train", global_batch_size=1)))


def build(tiny: bool) -> Any:
    from mvp_engine.hf.config_source import read_config
    from mvp_engine.hf.omni_model import OmniModel

    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with torch.device(DEVICE):
        model = OmniModel.from_config(read_config(None, model_config(tiny))).to(dtype)
    for parameter in model.parameters():  # experts are not initialised without a folder
        torch.nn.init.normal_(parameter, std=0.02)
    model.requires_grad_(False)
    model.talker.requires_grad_(True)
    return model


def timed(work: Any, steps: int) -> float:
    """Seconds of a call, after a warm-up."""
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        work()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def predictor(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    model = build(args.tiny)
    decoder = model.talker.code_predictor.model
    heads = model.talker.code_predictor.lm_head
    size, books = decoder.config.hidden_size, decoder.config.num_code_groups
    frames = int(tried)
    embeds = torch.randn(frames, books, size, device=DEVICE, dtype=next(decoder.parameters()).dtype)

    def one_pass() -> None:
        hidden = decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, 1:]
        weights = torch.stack([head.weight for head in heads])
        torch.bmm(hidden.transpose(0, 1), weights.transpose(1, 2)).float().logsumexp(-1).sum().backward()

    def growing_passes() -> None:
        for step, head in enumerate(heads):
            hidden = decoder(inputs_embeds=embeds[:, : step + 2], use_cache=False).last_hidden_state[:, -1]
            head(hidden).float().logsumexp(-1).sum().backward()

    one = timed(one_pass, args.steps)
    many = timed(growing_passes, max(1, args.steps // 4))
    return {"frames": frames, "one_pass_ms": 1e3 * one, "growing_passes_ms": 1e3 * many, "ratio": many / one}


def sync(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    """Whether a forward and backward of the model syncs with the GPU, and where."""
    if not ON_GPU:
        return {"host_sync": None, "reason": "needs a GPU"}
    model = build(args.tiny)
    batch = one_batch(folder, args.tiny, int(tried)).pin_memory().to(DEVICE, non_blocking=True)

    def work() -> None:
        model(batch, ["speech_loss"])["speech_loss"].sum().backward()

    work()  # kernels are chosen and compiled here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        import traceback

        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return {"host_sync": True, "where": places[-6:], "error": str(error)[:300]}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"host_sync": False}


def mimi(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    from transformers import MimiConfig, MimiModel

    from mvp_engine.kit import open_codec

    options: dict[str, Any] = {}
    if args.tiny:
        options = {"hidden_size": 32, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16}
        options |= {"vector_quantization_hidden_dimension": 16, "num_hidden_layers": 1, "intermediate_size": 32}
        options |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "upsample_groups": 32}
    torch.manual_seed(0)
    MimiModel(MimiConfig(**options)).save_pretrained(folder / "mimi")
    codec = open_codec(str(folder / "mimi"), 16, DEVICE)
    dice = np.random.default_rng(1)
    sounds = [
        dice.normal(0, 0.1, round(24_000 * one)).astype(np.float32) for one in seconds(dice, int(tried), args.tiny)
    ]
    total = sum(map(len, sounds)) / 24_000
    took = timed(lambda: codec.encode_many(sounds), max(1, args.steps // 4))
    return {"sounds": len(sounds), "audio_seconds": total, "seconds": took, "real_time": total / took}


PARTS = {"train": train, "predictor": predictor, "sync": sync, "mimi": mimi}


def about() -> dict[str, Any]:
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    hardware = torch.cuda.get_device_name() if ON_GPU else platform.processor()
    return {"hardware": hardware, "versions": versions, "command": shlex.join(["python", *sys.argv])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512)
    text = "tokens of a pack, and activation checkpointing, of each training"
    parser.add_argument("--tried", nargs="*", default=["8192:none", "16384:none", "32768:selective"], help=text)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--inside", nargs=3, metavar=("PART", "TRIED", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.workers, args.rows = min(args.steps, 2), 0, 12
    if args.inside:
        part, tried, folder = args.inside
        (Path(folder) / FOUND).write_text(json.dumps(PARTS[part](Path(folder), args, tried)))
        return
    attempts = {"train": args.tried, "predictor": ["4096"], "sync": ["8192"], "mimi": ["64"]}
    if args.tiny:
        attempts = {"train": ["512:none"], "predictor": ["32"], "sync": ["512"], "mimi": ["4"]}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_rows(Path(name), args.rows, args.tiny)
        for part in args.parts:
            for tried in attempts[part]:
                rows.append({"part": part} | attempt(__file__, part, tried, name))
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({**about(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
