"""The argument parser of `mvp`: its commands and options. `run` of a command is the name of its function in cli.py."""

from __future__ import annotations

import argparse
from typing import Any

from mvp_engine import __version__
from mvp_engine.tools.command_parsers import (
    add_command,
    add_config_command,
    add_group,
    add_json_option,
    add_overrides,
)
from mvp_engine.tools.hinting_parser import HintingParser
from mvp_engine.tools.training_arguments import (
    RUN,
    add_doctor_command,
    add_estimate_commands,
    add_launch_commands,
    add_replay_command,
    add_training_commands,
)


def build_parser() -> argparse.ArgumentParser:
    text = "Fine-tune and pre-train models on text, images, video and audio."
    parser = HintingParser(prog="mvp", description=text)
    parser.add_argument("--version", action="version", version=f"mvp_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_training_commands(commands)
    add_launch_commands(commands)
    _add_chat_command(commands)
    _add_data_commands(commands)
    add_estimate_commands(commands)
    _add_models_command(commands)
    add_doctor_command(commands)
    _add_config_commands(commands)
    _add_recipe_commands(commands)
    _add_runs_commands(commands)
    _add_merge_command(commands)
    _add_push_command(commands)
    add_replay_command(commands)
    _add_skills_commands(commands)
    return parser


def _add_models_command(commands: Any) -> None:
    text = "list the model types of transformers: what each supports, or why not"
    models = add_command(commands, "models", text)
    text = "one model type, such as qwen3 (model_type in its config.json): prints the reasons"
    models.add_argument("name", nargs="?", metavar="NAME", help=text)
    add_json_option(models)
    models.set_defaults(run="models")


def _add_recipe_commands(commands: Any) -> None:
    recipe = add_group(commands, "recipe", "list recipes, or create one from another")
    listing = add_command(recipe, "list", "list all recipes")
    add_json_option(listing)
    listing.set_defaults(run="recipe_list")

    new = add_command(recipe, "new", "create a recipe as a copy of another; it runs at once")
    new.add_argument("name", metavar="NAME", help="letters, digits and underscores")
    new.add_argument(
        "--from", dest="origin", required=True, metavar="RECIPE", help="name or folder of a recipe"
    )
    text = "parent folder (default: recipes/ if it exists, else .)"
    new.add_argument("--dir", metavar="DIR", help=text)
    new.set_defaults(run="recipe_new")


def _add_skills_commands(commands: Any) -> None:
    skills = add_group(commands, "skills", "skills for coding agents")
    install = add_command(skills, "install", "copy skills to .agents/skills, link .claude/skills")
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
    config = add_group(commands, "config", text)
    show = add_config_command(config, "show", "print the resolved config as YAML")
    show.set_defaults(run="config_show")
    schema = add_config_command(config, "schema", "print the JSON Schema of a recipe's config")
    schema.set_defaults(run="config_schema")
    explain = add_command(config, "explain", "type, default and meaning of a key or a section")
    explain.add_argument("key", metavar="KEY", help="such as optim.lr, or parallel")
    reference = add_command(config, "reference", "print a Markdown page of all keys")
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
    data = add_group(commands, "data", "inspect training data, make codes of speech")
    text = "show rows as the model sees them, the tokens with loss, lengths, packing and bad rows"
    inspect = add_command(data, "inspect", text)
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
    add_json_option(inspect)
    inspect.set_defaults(run="data_inspect")
    text = "make the codes of all sounds that a config's model learns to speak, on a GPU if there is one"
    codes = add_command(data, "codes", text)
    codes.add_argument("config", metavar="CONFIG", help="a recipe's YAML file with mllm.speech")
    codes.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of config keys")
    add_json_option(codes)
    codes.set_defaults(run="data_codes")


def _add_chat_command(commands: Any) -> None:
    text = "chat with a trained model: a run, a Hugging Face folder or a LoRA adapter"
    chat = add_command(commands, "chat", text)
    chat.add_argument(
        "target",
        metavar="RUN|FOLDER|ADAPTER",
        help=f"{RUN}; the folder of a model or an adapter; or a Hub id",
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
    chat.add_argument("--speech-temperature", type=float, metavar="T", help=text)
    text = "most frames of a sound, 12.5 a second for Qwen3-Omni (default: 1024)"
    chat.add_argument("--max-frames", type=int, metavar="N", help=text)
    chat.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU if present)")
    chat.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    add_json_option(chat)
    chat.set_defaults(run="chat")


def _add_merge_command(commands: Any) -> None:
    text = "convert a checkpoint to a Hugging Face folder, or to a state dict of a plain module, on a CPU"
    merge = add_command(commands, "merge", text)
    text = "a checkpoint, or a run (its newest one): a folder, an id or latest"
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
    push = add_command(commands, "push", text)
    push.add_argument("name", metavar="RUN", help=RUN)
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
    add_json_option(push)
    push.set_defaults(run="push")


def _add_runs_commands(commands: Any) -> None:
    runs = add_group(commands, "runs", "list, show, plot and compare runs")
    listing = add_command(runs, "list", "list all runs, oldest first")
    listing.set_defaults(run="runs_list")

    show = add_command(runs, "show", "show one run: status, last metrics, checkpoints")
    show.add_argument("name", nargs="?", metavar="RUN", help="folder or id (default: the newest)")
    show.set_defaults(run="runs_show")

    plot = add_command(runs, "plot", "plot a metric of one or more runs")
    plot.add_argument("names", nargs="+", metavar="RUN", help=RUN)
    plot.add_argument("--metric", default="loss", help="name of the metric (default: loss)")
    text = "output file (default: <metric>.png in the first run's folder)"
    plot.add_argument("--out", metavar="PNG", help=text)
    plot.set_defaults(run="runs_plot")

    diff = add_command(runs, "diff", "compare the configs and last metrics of two runs")
    diff.add_argument("names", nargs=2, metavar="RUN", help=RUN)
    diff.set_defaults(run="runs_diff")

    for command in (listing, show, plot, diff):
        command.add_argument(
            "--dir", default="outputs", help="folder of the runs, project.dir (default: outputs)"
        )
        add_json_option(command)
