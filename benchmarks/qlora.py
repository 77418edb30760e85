"""QLoRA against LoRA in bf16: peak memory and tokens per second of training steps, on one GPU.

    PYTHONPATH=. python benchmarks/qlora.py --out benchmarks/results/qlora.json    # three minutes on an H200
    PYTHONPATH=. python benchmarks/qlora.py --tiny                                  # anywhere; figures mean nothing

Rows: LoRA and QLoRA (model.quantize={llm: nf4}) on the shape of Qwen3-VL-8B, QLoRA on that of Qwen3-32B; weights are
random, filled on the GPU. A pack has 4,096 tokens in rows of 1,024; those of the VLM have an image of 256 tokens per
row. Adapters of rank 16 are on all linear layers of the language model, blocks of the language model are compiled and
have full activation checkpointing. A step is one pack, forward, backward and AdamW. Columns:

- weights: GiB of parameters
- peak: GiB that tensors take at most during the steps; `reserved`: what the allocator held; `start`: the peak before
- step: milliseconds, median; tokens per second follow from it
- first: seconds of the first step (compilation)

Before the rows: the kernel that dequantizes, against the plain path on the CPU (bit-equal), and its bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # for mvp_engine, if it is not installed

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import ModelEngine, ModelSource, Settings, engine_class
from mvp_engine.model_engine.fsdp import base_engine, init_weights
from mvp_engine.ops import nf4

SHAPES = Path(__file__).parent / "hardware" / "shapes.yaml"
GIB = 2**30
ROWS = (
    ("LoRA bf16", "Qwen/Qwen3-VL-8B-Instruct", {}),
    ("QLoRA nf4", "Qwen/Qwen3-VL-8B-Instruct", {"llm": "nf4"}),
    ("QLoRA nf4", "Qwen/Qwen3-32B", {"llm": "nf4"}),
)
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip


def fill_at_random(model: nn.Module, *_: Any) -> None:
    """Instead of the engine's initialization, which is equal on every layout but runs on the CPU: minutes for 32B."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    init_weights.allocate(model, device)
    quantized = nf4.quantized_layers(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in quantized:
                codes = quantized[name].in_features // 2
                stored = param.data.view(torch.uint8)
                stored.random_(0, 256)
                scales = torch.full((len(stored), codes * 2 // nf4.BLOCK), 0.05, device=device)
                stored[:, codes:] = scales.view(torch.uint8)
            elif "norm" in name and param.ndim == 1:
                param.fill_(1.0)
            else:
                param.normal_(0, 0.02 if ".lora_B." not in name else 1e-4)
    skeleton: Any = model
    for module in skeleton.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in name:  # rotary frequencies
                half = torch.arange(len(buffer), device=device, dtype=torch.float32) / len(buffer)
                buffer.copy_(5e6**-half)


def pack(config: Any, tokens: int, images: bool, device: torch.device) -> PackedBatch:
    """Rows of a quarter of the tokens, each with one square image of a quarter of the row."""
    row = tokens // 4
    ids = torch.randint(1000, 100_000, (4, row))
    if not images:
        return PackedBatch.from_sequences(list(ids))
    merge = config["vision_config"].get("spatial_merge_size", 2)
    side = int((row // 4) ** 0.5)
    patches = (side * merge) ** 2
    ids[:, 1 : 1 + side**2] = config["image_token_id"]
    values = torch.randn(4 * patches, 3 * 2 * config["vision_config"]["patch_size"] ** 2)
    grids = torch.tensor([[1, side * merge, side * merge]] * 4)
    media = Media(values, torch.full((4,), patches), torch.arange(4), {"image_grid_thw": grids})
    positions = [torch.arange(row).expand(3, row) for _ in range(4)]
    types = [(one == config["image_token_id"]).long() for one in ids]
    fields = {"mm_token_type_ids": types}
    return PackedBatch.from_sequences(
        list(ids), position_ids=positions, token_fields=fields, media={"pixel_values": media}
    )


def measure(name: str, shape: str, quantize: Any, args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    config = shape_of(shape, args.tiny)
    model = MLLMModelKit(Lora(rank=16)).build(ModelSource(None, config))
    compiled = {"llm": "inductor"} if args.compile and on_gpu else None
    settings = Settings(
        precision="bf16",
        compile=compiled,
        activation_checkpointing={"llm": "full"},
        quantize=quantize,
        clip_grad_norm=1.0,
    )
    world = World(0, 1, 0, 1, device)
    engine: ModelEngine = engine_class("language_model")(model, Layout(world), settings)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    engine.initialize(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-4, fused=on_gpu))
    _wait()
    found: dict[str, Any] = {"name": name, "shape": shape, "start_s": time.perf_counter() - begin}
    found["start_gib"] = _peak()
    found["weights_gib"] = sum(p.nbytes for p in model.parameters()) / GIB
    found["parameters"] = sum(nf4.num_parameters(model).values())
    found["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    batch = pack(config, args.tokens, "vision_config" in config, device)

    def forward_step(one: PackedBatch) -> Any:
        return engine.model(one, ["loss"])["loss"], one.num_loss_tokens

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    with engine.train_mode():
        for _ in range(args.steps + 2):
            _wait()
            begin = time.perf_counter()
            numbers = engine.train_batch([batch], forward_step)
            _wait()
            times.append(time.perf_counter() - begin)
    found["loss"] = float(numbers.loss_sum / numbers.weight)
    found["first_s"] = times[0]
    found["step_ms"] = statistics.median(times[2:]) * 1e3
    found["tokens_per_s"] = args.tokens / found["step_ms"] * 1e3
    found["peak_gib"] = _peak()
    found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB if on_gpu else None
    return found


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(SHAPES.read_text())[name]
    if tiny:
        config.get("text_config", config).update(TINY)
        if "vision_config" in config:
            small = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 128}
            config["vision_config"].update(small, deepstack_visual_indexes=[0, 1])
            config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    return config


def kernel() -> dict[str, Any]:
    """Whether the GPU's numbers are those of the CPU, and the bandwidth of dequantizing a 12288 x 4096 weight."""
    weight = torch.randn(512, 4096)
    stored = nf4.quantize(weight, torch.bfloat16)
    on_gpu = nf4.quantize(weight.cuda(), torch.bfloat16)
    same = torch.equal(stored.view(torch.uint8), on_gpu.cpu().view(torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        expected = nf4.dequantize(stored, 4096, dtype)
        same = same and torch.equal(nf4.dequantize(on_gpu, 4096, dtype).cpu(), expected)
    large = nf4.quantize(torch.randn(12288, 4096, device="cuda"), torch.bfloat16)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(20):  # so that the GPU does not wait for the host
            out = nf4.dequantize(large, 4096, torch.bfloat16)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 20)
    ms = statistics.median(times[5:])
    return {"equal_to_cpu": same, "ms": ms, "tb_per_s": (large.nbytes + out.nbytes) / ms / 1e9}


def _peak() -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rows", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    base_engine.materialize_weights = fill_at_random
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {"gpu": gpu, **versions, "tokens": args.tokens, "rows": []}
    if gpu:
        result["kernel"] = kernel()
        print(json.dumps(result["kernel"]), flush=True)
    for index in args.rows:
        name, shape, quantize = ROWS[index]
        try:
            found = measure(name, shape, quantize, args)
        except torch.OutOfMemoryError as error:
            found = {"name": name, "shape": shape, "error": str(error).splitlines()[0]}
        gc.collect()
        torch.compiler.reset()
        result["rows"].append(found)
        print(json.dumps(found), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
