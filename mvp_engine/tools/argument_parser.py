"""The argument parser of `mvp`: its commands and options. `run` of a command is the name of its function in cli.py."""

from __future__ import annotations

import argparse
from typing import Any

from mvp_engine import __version__
from mvp_engine.tools.estimate_arguments import (
    add_estimate_options,
    add_overrides,
    add_plan_options,
)
from mvp_engine.tools.hinting_parser import HintingParser

_RUN = "a run's folder or id, or latest"


def build_parser() -> argparse.ArgumentParser:
    text = "Fine-tune and pre-train models on text, images, video and audio."
    parser = HintingParser(prog="mvp", description=text)
    parser.add_argument("--version", action="version", version=f"mvp_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_training_commands(commands)
    _add_launch_commands(commands)
    _add_chat_command(commands)
    _add_data_commands(commands)
    _add_estimate_commands(commands)
    _add_models_command(commands)
    _add_doctor_command(commands)
    _add_config_commands(commands)
    _add_recipe_commands(commands)
    _add_runs_commands(commands)
    _add_merge_command(commands)
    _add_push_command(commands)
    _add_replay_command(commands)
    _add_skills_commands(commands)
    return parser


def _add_training_commands(commands: Any) -> None:
    """Commands that run a config on one or more ranks."""
    train = _add_config_command(commands, "train", "train the model of a config, or resume its run")
    train.set_defaults(run="train")

    text = "evaluate a checkpoint, by default the newest run's (or resume=PATH)"
    evaluate = _add_config_command(commands, "evaluate", text)
    evaluate.set_defaults(run="evaluate")

    text = (
        "dry-run a config: data, model, a few training steps, one evaluation batch; leaves no files"
    )
    check = _add_config_command(commands, "check", text)
    _add_json_option(check)
    check.set_defaults(run="check")

    text = "profile training steps: where their time and memory go, as a page and a trace"
    profile = _add_config_command(commands, "profile", text)
    profile.add_argument(
        "--out", default="profile", metavar="DIR", help="output folder (default: profile)"
    )
    profile.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of steps to profile (default: 3)"
    )
    text = "first measured step; the ones before it warm up (default: 6)"
    profile.add_argument("--first", type=int, default=6, metavar="N", help=text)
    profile.set_defaults(run="profile")

    for command in (train, evaluate, check, profile):
        _add_node_options(command)


def _add_node_options(
    command: argparse.ArgumentParser, ranks: str = "1; under srun, one per GPU"
) -> None:
    text = f"processes (ranks) on this machine (default: {ranks})"
    command.add_argument("--nproc", type=int, metavar="N", help=text)
    text = "machines that train together; srun sets this and the next three by itself (default: 1). 1:2: elastic, it "
    text += "continues with one of two when the other is lost"
    command.add_argument("--nnodes", metavar="N", help=text)
    command.add_argument("--node-rank", type=int, metavar="N", help="which of them this is, from 0")
    command.add_argument("--master-addr", metavar="HOST", help="host name of node 0")
    text = "a free port of node 0 (default: 29500)"
    command.add_argument("--master-port", type=int, metavar="PORT", help=text)


def _add_launch_commands(commands: Any) -> None:
    launch = _add_group(commands, "launch", "scripts that start a training on a cluster")
    text = "print an sbatch script, which saves and queues itself again when its time is over"
    slurm = _add_config_command(launch, "slurm", text)
    slurm.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)"
    )
    slurm.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs per node (default: 8)"
    )
    slurm.add_argument("--cpus", type=int, metavar="N", help="CPU cores per node")
    slurm.add_argument(
        "--time", default="24:00:00", metavar="TIME", help="as for sbatch (default: 24:00:00)"
    )
    text = "seconds before the end of the time at which the training saves (default: 600)"
    slurm.add_argument("--grace", type=int, default=600, metavar="S", help=text)
    text = "another option of sbatch, such as --sbatch=--partition=gpu; may be repeated"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
    slurm.set_defaults(run="launch_slurm")


def _add_doctor_command(commands: Any) -> None:
    text = "check this machine: versions, GPUs, kernels, media, disk, all-reduce; each line ok or a fix"
    doctor = _add_command(commands, "doctor", text)
    text = "also check the disk and the kernels for this YAML file or shipped config"
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help=text)
    add_overrides(doctor)
    text = "folder of the runs (default: outputs, or project.dir of CONFIG)"
    doctor.add_argument("--dir", metavar="DIR", help=text)
    _add_node_options(doctor, "one per GPU")
    _add_json_option(doctor)
    doctor.set_defaults(run="doctor")


def _add_models_command(commands: Any) -> None:
    text = "list the model types of transformers: what each supports, or why not"
    models = _add_command(commands, "models", text)
    text = "one model type, such as qwen3 (model_type in its config.json): prints the reasons"
    models.add_argument("name", nargs="?", metavar="NAME", help=text)
    _add_json_option(models)
    models.set_defaults(run="models")


def _add_replay_command(commands: Any) -> None:
    text = "find the rows and the parameter that made a step of a run non-finite, or fail"
    replay = _add_command(commands, "replay", text)
    replay.add_argument("name", metavar="RUN", help=_RUN)
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="changes to its config")
    text = "the step (default: the last that was skipped or failed; of a streak, its first)"
    replay.add_argument("--step", type=int, metavar="N", help=text)
    text = "processes (default: as many as the run had)"
    replay.add_argument("--nproc", type=int, metavar="N", help=text)
    replay.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    _add_json_option(replay)
    replay.set_defaults(run="replay")


def _add_estimate_commands(commands: Any) -> None:
    text = (
        "predict memory and time on GPUs that need not be present; exit code 2 if it does not fit"
    )
    estimate = _add_command(commands, "estimate", text)
    add_estimate_options(estimate)
    estimate.set_defaults(run="estimate")
    text = "simulate a training step on any number of ranks: memory, collectives, hangs"
    plan = _add_command(commands, "plan", text)
    add_plan_options(plan)
    plan.set_defaults(run="plan")
    for command in (estimate, plan):
        _add_json_option(command)


def _add_recipe_commands(commands: Any) -> None:
    recipe = _add_group(commands, "recipe", "list recipes, or create one from another")
    listing = _add_command(recipe, "list", "list all recipes")
    _add_json_option(listing)
    listing.set_defaults(run="recipe_list")

    new = _add_command(recipe, "new", "create a recipe as a copy of another; it runs at once")
    new.add_argument("name", metavar="NAME", help="letters, digits and underscores")
    new.add_argument(
        "--from", dest="origin", required=True, metavar="RECIPE", help="name or folder of a recipe"
    )
    text = "parent folder (default: recipes/ if it exists, else .)"
    new.add_argument("--dir", metavar="DIR", help=text)
    new.set_defaults(run="recipe_new")


def _add_skills_commands(commands: Any) -> None:
    skills = _add_group(commands, "skills", "skills for coding agents")
    install = _add_command(skills, "install", "copy skills to .agents/skills, link .claude/skills")
    install.add_argument(
        "--dir",
        default=".",
        metavar="DIR",
        help="the project's folder (default: .); ~ for all projects",
    )
    install.add_argument("--force", action="store_true", help="replace skills of the same names")
    install.set_defaults(run="skills_install")


def _add_config_commands(commands: Any) -> None:
    text = "print a resolved config, its JSON Schema, or what a key means"
    config = _add_group(commands, "config", text)
    show = _add_config_command(config, "show", "print the resolved config as YAML")
    show.set_defaults(run="config_show")
    schema = _add_config_command(config, "schema", "print the JSON Schema of a recipe's config")
    schema.set_defaults(run="config_schema")
    explain = _add_command(config, "explain", "type, default and meaning of a key or a section")
    explain.add_argument("key", metavar="KEY", help="such as optim.lr, or parallel")
    reference = _add_command(config, "reference", "print a Markdown page of all keys")
    for command in (explain, reference):
        command.add_argument(
            "config",
            nargs="?",
            metavar="CONFIG",
            help="config of a recipe that defines its own keys",
        )
    explain.set_defaults(run="config_explain")
    reference.set_defaults(run="config_reference")


def _add_data_commands(commands: Any) -> None:
    data = _add_group(commands, "data", "inspect training data, make codes of speech")
    text = "show rows as the model sees them, the tokens with loss, lengths, packing and bad rows"
    inspect = _add_command(data, "inspect", text)
    inspect.add_argument(
        "what",
        metavar="FILE|CONFIG",
        help="a data file of any format, hf://org/dataset, or a recipe's YAML file",
    )
    add_overrides(inspect)
    inspect.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or Hub id (org/name) with the processor or tokenizer",
    )
    inspect.add_argument(
        "--split", default="train", help="split of a config's sources (default: train)"
    )
    text = "show only this row, in full: its index from 0, or FILE:LINE"
    inspect.add_argument("--row", metavar="N", help=text)
    inspect.add_argument(
        "--limit", type=int, default=3, metavar="N", help="number of rows to show (default: 3)"
    )
    text = "tokens per pack, where a data file is inspected (default: 8192)"
    inspect.add_argument("--tokens", type=int, default=8192, metavar="N", help=text)
    text = "decode all media, which finds corrupt files"
    inspect.add_argument("--decode", action="store_true", help=text)
    text = "exit with 2 if a row is bad or dropped, as a check before a training"
    inspect.add_argument("--strict", action="store_true", help=text)
    _add_json_option(inspect)
    inspect.set_defaults(run="data_inspect")
    text = "make the codes of all sounds that a config's model learns to speak, on a GPU if there is one"
    codes = _add_command(data, "codes", text)
    codes.add_argument("config", metavar="CONFIG", help="a recipe's YAML file with mllm.speech")
    codes.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of config keys")
    _add_json_option(codes)
    codes.set_defaults(run="data_codes")


def _add_chat_command(commands: Any) -> None:
    text = "chat with a trained model: a run, a Hugging Face folder or a LoRA adapter"
    chat = _add_command(commands, "chat", text)
    chat.add_argument(
        "target",
        metavar="RUN|FOLDER|ADAPTER",
        help=f"{_RUN}; the folder of a model or an adapter; or a Hub id",
    )
    for kind in ("image", "video", "audio"):
        chat.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="FILE",
            help="attached to the first message; may be given several times",
        )
    chat.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="answer this message and exit (default: read messages from the terminal)",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens of an answer (default: 512)",
    )
    chat.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy decoding"
    )
    text = "sample from the N most likely tokens (default: all)"
    chat.add_argument("--top-k", type=int, metavar="N", help=text)
    text = "sample from the most likely tokens that have this probability together (default: 1)"
    chat.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
    chat.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)"
    )
    text = "an answer ends before this text; may be given several times"
    chat.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = "speak the answers of an Omni model into this WAV file; later answers get a number"
    chat.add_argument("--speak", metavar="FILE", help=text)
    chat.add_argument("--speaker", metavar="NAME", help="the voice (default: the model's first)")
    text = "play codes with this codec, a folder or file.py:Class (default: the model's vocoder)"
    chat.add_argument("--codec", metavar="CODEC", help=text)
    text = "of the spoken codes; 0: greedy (default: 0.9)"
    chat.add_argument("--speech-temperature", type=float, default=0.9, metavar="T", help=text)
    chat.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU if present)")
    chat.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    _add_json_option(chat)
    chat.set_defaults(run="chat")


def _add_merge_command(commands: Any) -> None:
    text = "convert a checkpoint to a Hugging Face folder, on a CPU, one weight file at a time"
    merge = _add_command(commands, "merge", text)
    text = "a checkpoint, or a run folder (its newest one)"
    merge.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
    merge.add_argument("out", metavar="OUT", help="the folder to write")
    merge.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: that of the pretrained folder)",
    )
    text = "largest size of one weight file (default: 5)"
    merge.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help=text)
    merge.add_argument(
        "--engine",
        metavar="FILE",
        help="file or module that registers a custom model type, if it moved since training",
    )
    text = "LoRA: write only the adapter, in peft's format"
    merge.add_argument("--adapter", action="store_true", help=text)
    text = "LoRA: folder or Hub id of the base model, if it moved"
    merge.add_argument("--base", metavar="MODEL", help=text)
    text = "write the EMA weights (optim.ema), not the last ones"
    merge.add_argument("--ema", action="store_true", help=text)
    merge.set_defaults(run="merge")


def _add_push_command(commands: Any) -> None:
    text = "upload a run's model to the Hugging Face Hub, with a model card; private by default"
    push = _add_command(commands, "push", text)
    push.add_argument("name", metavar="RUN", help=_RUN)
    text = "repository on the Hub, created if it does not exist"
    push.add_argument("repository", metavar="ORG/NAME", help=text)
    push.add_argument("--public", action="store_true", help="a public repository")
    text = "LoRA: upload only the adapter, in peft's format"
    push.add_argument("--adapter", action="store_true", help=text)
    push.add_argument(
        "--license",
        metavar="NAME",
        help="license in the model card (default: that of the base model)",
    )
    push.add_argument("--dry-run", action="store_true", help="print files and card, upload nothing")
    push.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    _add_json_option(push)
    push.set_defaults(run="push")


def _add_runs_commands(commands: Any) -> None:
    runs = _add_group(commands, "runs", "list, show, plot and compare runs")
    listing = _add_command(runs, "list", "list all runs, oldest first")
    listing.set_defaults(run="runs_list")

    show = _add_command(runs, "show", "show one run: status, last metrics, checkpoints")
    show.add_argument("name", nargs="?", metavar="RUN", help="folder or id (default: the newest)")
    show.set_defaults(run="runs_show")

    plot = _add_command(runs, "plot", "plot a metric of one or more runs")
    plot.add_argument("names", nargs="+", metavar="RUN", help=_RUN)
    plot.add_argument("--metric", default="loss", help="name of the metric (default: loss)")
    text = "output file (default: <metric>.png in the first run's folder)"
    plot.add_argument("--out", metavar="PNG", help=text)
    plot.set_defaults(run="runs_plot")

    diff = _add_command(runs, "diff", "compare the configs and last metrics of two runs")
    diff.add_argument("names", nargs=2, metavar="RUN", help=_RUN)
    diff.set_defaults(run="runs_diff")

    for command in (listing, show, plot, diff):
        command.add_argument(
            "--dir", default="outputs", help="folder of the runs, project.dir (default: outputs)"
        )
        _add_json_option(command)


def _add_group(commands: Any, name: str, text: str) -> Any:
    group = commands.add_parser(name, help=text, description=text)
    return group.add_subparsers(required=True, metavar="COMMAND")


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(parser=command)  # it reports unknown options
    return command


def _add_config_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command on a config file and its overrides."""
    command = _add_command(commands, name, text)
    text = "a YAML file, or the config of a shipped recipe, such as sft/lora"
    command.add_argument("config", metavar="CONFIG", help=text)
    add_overrides(command)
    return command


def _add_json_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for programs")
