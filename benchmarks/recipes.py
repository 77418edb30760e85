"""The shipped GPU configs as users run them, on random folders of real shapes, and peers on the same rows: one table.

    PYTHONPATH=. python benchmarks/recipes.py --out benchmarks/results/recipes.json
    PYTHONPATH=. python benchmarks/recipes.py --only text_0.6b vlm_2b --limit 240 --out FILE --add
    PYTHONPATH=. python benchmarks/recipes.py --only text_0.6b --starts 3 --out FILE --add     # only start times
    PYTHONPATH=. python benchmarks/recipes.py --tiny --steps 10         # tries everything on a CPU
    python benchmarks/recipes.py --table FILE                           # prints the table of a file

A row is a config of `recipes/`, a model folder with random weights in bf16, and a file of rows; nothing else is set but
the paths, the number of steps, and that nothing is evaluated, saved or exported. Folders and rows are made once, in
`--folder`. Each row is started twice, as a process of its own: with an empty compile cache (`cold`) and, for the
profile, with the one that the first start filled (`warm`). `first step` and `full speed` are seconds from the command
to the end of step 1, and to the first interval whose steps take at most 1.1 times the median of the second half, which
is what counts for throughput. Times are read from the run's own metrics, idle time from `mvp profile`.

Peers train the same folder on the same rows with packing, bf16 and fused AdamW: TRL with Liger's kernels, Unsloth and
Axolotl, where they are installed (`--peers-python`: they may need other versions than ours). MFU of a peer is ours
times the ratio of tokens/s.
`--limit` ends a process and its children after so many seconds; what it had logged by then counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attempt import failure
from benchmarks.bytecode import compile_bytecode
from benchmarks.recipes_figures import figures, starts_table, table
from benchmarks.recipes_peers import PEERS, train_peer, versions
from benchmarks.sft import files
from benchmarks.sft.data import KNOWN, PER_STEP, VISION, chat_length, rows, shape
from benchmarks.watch import Watched, ended_by_sigterm, watch
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.build_once import PARAMETERS_FILE, build_once
from mvp_engine.tools.profile_kernels import sampled_clock

ROOT = Path(__file__).parents[1]
START_STEPS = 8  # of a start whose times are measured alone; each is logged
FIRST_STEP = r"\bstep +1\b"  # in the output of `mvp profile`
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- message.content + ' ' }}"
    "{%- if message.role == 'assistant' %}<|im_end|>{%- endif %}{%- endfor %}"
)


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    config: str
    shape: str
    tiny: str
    rows: str  # chats, images, documents
    words: list[str] = field(default_factory=list)
    longest: int = 8192  # tokens of a row
    lora: int | None = None
    peers: bool = False


SFT = "qwen3/configs/sft_gpu1.yaml"
# What fits on 80 GB with optimizer states on the host, also where the GPU is larger.
FULL_8B = ["data.pack_tokens=16384", "model.activation_checkpointing=full", "optim.state_dtype=bfloat16"]
LONG = ["data.max_length=131072", "data.global_batch_tokens=131072"]
FP8 = ["model.fp8=all"]
VLM = "qwen3_vl/configs/instruct_gpu1.yaml"
WORKS = {
    "text_0.6b": Work(SFT, "qwen3_0_6b", "tiny", "chats", peers=True),
    "text_1.7b": Work(SFT, "qwen3_1_7b", "tiny", "chats", peers=True),
    "text_1.7b_fp8": Work(SFT, "qwen3_1_7b", "tiny", "chats", FP8),
    "lora_8b": Work("qwen3/configs/sft_gpu1_lora.yaml", "qwen3_8b", "tiny", "chats", lora=16, peers=True),
    "vlm_2b": Work(VLM, "qwen3_vl_2b", "tiny_vl", "images"),
    "vlm_2b_fp8": Work(VLM, "qwen3_vl_2b", "tiny_vl", "images", FP8),
    "experts_a3b": Work(SFT, "qwen3_a3b_6", "tiny_moe", "chats"),
    "experts_a3b_fp8": Work(SFT, "qwen3_a3b_6", "tiny_moe", "chats", FP8[:1]),
    "full_8b": Work(SFT, "qwen3_8b", "tiny", "chats", FULL_8B),
    "full_8b_offload": Work(SFT, "qwen3_8b", "tiny", "chats", [*FULL_8B, "optim.offload=true"]),
    "long_128k": Work(SFT, "qwen3_1_7b", "tiny", "documents", LONG, longest=131072),
}


def make_folder(name: str, longest: int, base: Path) -> Path:
    """A Hugging Face folder with random weights in bf16, and a processor that reads numbers as words."""
    positions = max(32768, longest)

    def build(folder: Path) -> None:
        others = sorted(base.glob(f"{name}-*/config.json"))
        if not others:
            save_folder(name, positions, folder)
            return
        config = json.loads(others[0].read_text())  # for other rows: the same but for one number
        config.get("text_config", config)["max_position_embeddings"] = positions
        (folder / "config.json").write_text(json.dumps(config))
        for file in others[0].parent.iterdir():
            if file.name not in ("config.json", PARAMETERS_FILE):
                os.link(file, folder / file.name)

    return build_once(base / f"{name}-{longest}", {"shape": name, "positions": positions}, build, "--folder")


def save_folder(name: str, positions: int, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = shape(name)
    settings.get("text_config", settings)["max_position_embeddings"] = positions
    auto: Any = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    processor = files.processor()
    if name not in VISION:
        processor = processor.tokenizer
        processor.chat_template = CHAT_TEMPLATE
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()  # all of the GPU is for the trainings: `auto` fills what is free


def make_rows(work: Work, count: int, base: Path) -> Path:
    """A jsonl of `count` rows: chats or documents as numbers in words, or text behind JPEG files."""

    def build(folder: Path) -> None:
        if work.rows == "images":
            files.write(folder, rows("images", -(-count // PER_STEP["images"])))
            return
        dice = random.Random(0)
        with (folder / "rows.jsonl").open("w") as file:
            for _ in range(count):
                file.write(json.dumps(make_row(work, dice)) + "\n")

    about = {"rows": work.rows, "longest": work.longest, "count": count}
    return build_once(base / f"{work.rows}-{work.longest}-{count}", about, build, "--folder") / "rows.jsonl"


def make_row(work: Work, dice: random.Random) -> dict[str, Any]:
    if work.rows == "documents":
        return {"text": words_of(dice, work.longest - 2)}
    size = chat_length(dice)
    question = {"role": "user", "content": words_of(dice, size // 4)}
    return {"messages": [question, {"role": "assistant", "content": words_of(dice, size - size // 4)}]}


def words_of(dice: random.Random, length: int) -> str:
    """Each word is one of four that its predecessor allows, so that there is something to learn."""
    found = [dice.randrange(KNOWN)]
    for _ in range(length - 1):
        found.append((found[-1] * 1103 + 12345 + dice.randrange(4) * 7) % KNOWN)
    return " ".join(map(str, found))


# ---- Our side ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def config_words(work: Work, model: Path, data: Path, args: argparse.Namespace) -> list[str]:
    """The config, and what is set of it: paths, no evaluation, nothing saved or exported."""
    words = [str(ROOT / "recipes" / work.config)]
    words += [f"data.sources.{name}.path={data}" for name in ("chats", "held_chats")]
    words += [f"model.path={model}", "eval.steps=null", "eval.generation=null", "checkpoint.interval=null"]
    words += ["export_link=null", "train.epochs=null", *work.words, *args.keys]
    if args.tiny:
        words += ["data.max_length=4096", "data.global_batch_tokens=8192", "data.num_workers=1", "model.compile=null"]
        words += [f"train.precision={'bf16' if FP8[0] in words else 'fp32'}", "cpu_threads=1"]
    return words


def caches(folder: Path) -> dict[str, str]:
    """The environment of a start whose compiled graphs and kernels are kept in a folder."""
    graphs, kernels = str(folder / "inductor"), str(folder / "triton")
    return {**environment(), "TORCHINDUCTOR_CACHE_DIR": graphs, "TRITON_CACHE_DIR": kernels}


def train(words: list[str], env: dict[str, str], folder: Path, steps: int, limit: float, interval: int) -> Watched:
    """A training up to a step, with its run in `folder`."""
    log = [f"train.max_steps={steps}", f"log.interval={interval}", "log.backends=[jsonl,file]"]
    command = [sys.executable, "-m", "mvp_engine.cli", "train", *words, f"output_dir={folder / 'runs'}", *log]
    return watch(command, folder, limit, env=env, last_step=steps)


def ours(work: Work, model: Path, data: Path, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    words = [*config_words(work, model, data, args), f"data.cache={scratch / 'costs'}"]
    env = environment() if args.warm else caches(scratch)
    began = time.perf_counter()
    with sampled_clock() as clock:
        cold = train(words, env, scratch, args.steps, args.limit, args.interval)
    found = {"command": shlex.join(["mvp", "train", *words]), **figures(cold)}
    found |= clock.between(*(began + second for second in found.pop("counted_s", (0, 0))))
    for run in scratch.glob("runs/*/run.json"):
        info = json.loads(run.read_text())
        found["auto"] = info.get("auto", {}).get("reason")
        setup = info.get("setup", {})
        found["versions"] = setup.get("versions")
        text = (run.parent / "log.txt").read_text() if (run.parent / "log.txt").is_file() else ""
        found["recompiles"] = len(re.findall(r"compiled after the first", text))
    if args.profile and "why" not in found:
        found |= profiled(words, env, args.limit, scratch)
        if "launches_per_step" in found and found["tokens_per_step"]:
            found["launches_per_token"] = found["launches_per_step"] / found["tokens_per_step"]
    return found


def starts(work: Work, model: Path, data: Path, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Seconds to the first step and to full speed, with empty and with filled caches in turn."""
    found: dict[str, Any] = {"cold": [], "warm": []}
    for number in range(args.starts):
        folder = scratch / str(number)
        words = [*config_words(work, model, data, args), f"data.cache={folder / 'costs'}"]
        for which in ("cold", "warm"):
            times = figures(train(words, caches(folder), folder / which, START_STEPS, args.limit, 1))
            kept = ("first_step_s", "full_speed_s", "step_s", "why", "output")
            found[which].append({key: times[key] for key in kept if key in times})
    return found


def profiled(words: list[str], env: dict[str, str], limit: float, scratch: Path) -> dict[str, Any]:
    """Idle time of the GPU, kernels of a step, and the seconds of a second start."""
    out = scratch / "profile"
    command = [sys.executable, "-m", "mvp_engine.cli", "profile", words[0], "--out", str(out)]
    command += ["--steps", "2", "--first", "4", *words[1:]]  # graphs are compiled by step 3
    seen = watch(command, scratch / "second", limit, env=env, pattern=FIRST_STEP)
    found: dict[str, Any] = {"second_start_s": seen.first}
    if (out / "profile.json").is_file():
        facts = json.loads((out / "profile.json").read_text())
        found |= {"idle": facts["idle"], "launches_per_step": facts["launches"]}
        found["profile"] = {key: facts[key] for key in facts if key != "kernels"}
    else:
        found["profile_why"] = seen.output
    return found


# ---- The table -----------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    found |= versions(sys.executable, ("torch", "transformers", "flash-attn-4"))
    on_gpu = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}"
    return {"hardware": hardware, "cores": os.cpu_count(), "versions": found}


def prepare(name: str, args: argparse.Namespace, count: int | None = None) -> tuple[Work, Path, Path]:
    """A row of the table, its model folder and its file of rows: `count`, or a little more than the steps take."""
    work = WORKS[name]
    if args.tiny:
        kept = [word for word in work.words if not word.startswith("data.")]
        longest = 512 if work.longest > 8192 else work.longest
        work = replace(work, shape=work.tiny, words=kept, longest=longest)
    model = make_folder(work.shape, work.longest, args.folder)
    if count is None:
        per_step = {"chats": 72, "images": 160, "documents": 1}[work.rows]
        steps = min(args.steps + 12, 24 if work.rows == "images" else 100)  # files of images take long to make
        count = 4 * args.steps if args.tiny else per_step * steps  # then they come again
    return work, model, make_rows(work, count, args.folder)


def measure(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Our row, and those of peers, each when it is measured."""
    mine = {"work": name, "side": "ours", **attempt(ours, name, args)}
    yield mine
    for side in args.peers if WORKS[name].peers else []:
        if PEERS[side].lora_only and not WORKS[name].lora:
            continue
        row = {"work": name, "side": side, **attempt(partial(theirs, side), name, args)}
        if "tokens_per_s" in row and mine.get("mfu"):
            row["mfu"] = mine["mfu"] * row["tokens_per_s"] / mine["tokens_per_s"]
        yield row


def theirs(side: str, work: Work, model: Path, data: Path, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    how = {"model": str(model), "rows": str(data), "steps": args.steps, "lora": work.lora}
    how |= {"longest": 512 if args.tiny else work.longest, "global_tokens": 512 if args.tiny else 65536}
    return train_peer(PEERS[side], how, args.peers_python, environment(), args.limit, scratch)


def attempt(side: Callable[..., dict[str, Any]], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a side measured, or why it failed: the others are measured all the same."""
    try:
        work, model, data = prepare(name, args)
        with tempfile.TemporaryDirectory(prefix="mvp-recipes-", ignore_cleanup_errors=True) as scratch:
            return side(work, model, data, args, Path(scratch))
    except Exception as error:  # noqa: BLE001 - out of memory or disk while a folder is made, say
        return failure(error)


def write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        atomic_write_text(out, json.dumps(result, indent=2) + "\n")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=WORKS, metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=5, help="steps of a log record; fewer where they are long")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one process")
    parser.add_argument("--tiny", action="store_true", help="small shapes and rows, for a CPU")
    parser.add_argument("--warm", action="store_true", help="use the compile cache of the user in the first start too")
    parser.add_argument("--starts", type=int, metavar="N", help="measure only the times of N cold and N warm starts")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="NAME", help="; ".join(PEERS))
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[])
    parser.add_argument("--peers-python", default=sys.executable, help="of an environment that has the peers")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mvp-recipes")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--add", action="store_true", help="keep the other rows of --out")
    parser.add_argument("--table", type=Path, help="only print the table of this JSON")
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="of our configs, to try others")
    args = parser.parse_args(words)
    if args.table:
        if not args.table.is_file():
            parser.error(f"--table {args.table}: no such file")
        result = json.loads(args.table.read_text())
        print(table(result), starts_table(result), sep="\n\n")
        return
    if shutil.which(args.peers_python) is None:
        parser.error(f"--peers-python {args.peers_python}: no such program")
    if args.steps < 2 * args.interval and not args.starts:
        parser.error(f"--steps {args.steps} are fewer than two intervals: set --interval to {max(1, args.steps // 2)}")
    result = {**about(), "commands": [], "rows": [], "starts": {}}
    if args.add and args.out and args.out.is_file():
        before = json.loads(args.out.read_text())
        replaced = [] if args.starts else args.only
        result["commands"] = before["commands"]
        result["rows"] = [row for row in before["rows"] if row["work"] not in replaced]
        result["starts"] = before.get("starts", {})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    result["commands"].append(shlex.join(["python", "benchmarks/recipes.py", *(words or sys.argv[1:])]))
    with ended_by_sigterm():
        compile_bytecode(args.folder)
        for name in args.only:
            if args.starts:
                result["starts"][name] = attempt(starts, name, args)
                write(result, args.out)
                print(starts_table({"starts": {name: result["starts"][name]}}), file=sys.stderr, flush=True)
                continue
            for row in measure(name, args):
                result["rows"].append(row)
                write(result, args.out)
                print(table({"rows": [row]}), file=sys.stderr, flush=True)
    print(table(result), starts_table(result), sep="\n\n")


if __name__ == "__main__":
    main()
