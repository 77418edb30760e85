"""The argument parser of `mvp`: its commands and options. `run` of a command is the name of its function in cli.py."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from mvp_engine import __version__, plugins
from mvp_engine.errors import EXIT_USER_ERROR, did_you_mean
from mvp_engine.tools.command_parsers import (
    CONFIG,
    add_command,
    add_config_command,
    add_group,
    add_json_option,
    add_overrides,
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
    add_plan_command(commands)
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
    data = add_group(commands, "data", "inspect training data, or prepare it")
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
    for name, command in plugins.load_all("data_command").items():
        of_kit = add_command(data, name, command.help)
        of_kit.add_argument("config", metavar="CONFIG", help=command.config_help)
        of_kit.add_argument(
            "overrides", nargs="*", metavar="key=value", help="overrides of config keys"
        )
        add_json_option(of_kit)
        of_kit.set_defaults(run="data_command", command=name)


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
    for option in plugins.load_all("chat_option").values():
        option.add_options(chat)
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


# The parser class of `mvp`: help texts with examples, error messages with what was probably meant.


RENAMED = {"estimate": "plan"}  # commands of earlier versions


class HintingParser(argparse.ArgumentParser):
    """argparse, with examples in its help, and what was probably meant in its error messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.epilog = EXAMPLES.get(self.prog)

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):
            self.print_help(sys.stderr)
            self.exit(EXIT_USER_ERROR)
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            name = RENAMED.get(wrong[1], wrong[1])
            message += did_you_mean(name, re.findall(r"[\w-]+", wrong[2]))
        wrong = re.search(r"unrecognized arguments: .*?(--[\w.-]+)", message)
        if wrong:
            message += f".{self._option_hint(wrong[1])}"
        super().error(message)

    def _option_hint(self, word: str) -> str:
        """The option that was probably meant, or the config key: people write `--learning_rate 1e-5`."""
        options = list(self._option_string_actions)
        similar = difflib.get_close_matches(word, options, 1, cutoff=0.8)
        if similar or all(action.dest != "overrides" for action in self._actions):
            return did_you_mean(word, similar or options)
        if word == "--config":
            return " Write the file without --config."
        from mvp_engine.config.explain import suggest_key
        from mvp_engine.kit.settings import MLLMConfig

        key = suggest_key(word.lstrip("-").replace("-", "_"), MLLMConfig)
        fix = "" if key.startswith("Known keys") else f" {key}"
        return f" Config keys are written as key=value, without dashes.{fix}"


# Examples below the help texts of `mvp` and its commands, by the program name of their parsers.

_ROWS = "model.path=Qwen/Qwen3-VL-2B-Instruct mllm.sources.rows.path=photos.jsonl"

EXAMPLES = {
    "mvp": f"""\
fine-tune a model on your own rows, in four commands:
  mvp data inspect photos.jsonl --model Qwen/Qwen3-VL-2B-Instruct
  mvp check sft/lora {_ROWS}
  mvp train sft/lora {_ROWS}
  mvp chat latest --image photo.jpg -p "What is in this photo?"

mvp COMMAND --help prints the options and examples of a command. Exit codes: 0 done, 1 a bug, 2 a user error,
75 stopped and saved.""",
    "mvp train": f"""\
examples:
  mvp train sft/lora {_ROWS}
  mvp train my/configs/train.yaml optim.lr=1e-4 loop.epochs=2 --nproc 8
  mvp train my/configs/train.yaml resume=auto       # continue the newest run

mvp config explain KEY prints what a key means, mvp config show CONFIG all keys with their values, and
mvp recipe list the recipes. A run writes its files to outputs/.""",
    "mvp evaluate": """\
examples:
  mvp evaluate latest                               # the newest run; or a run's folder or id
  mvp evaluate my/configs/train.yaml
  mvp evaluate my/configs/train.yaml resume=outputs/my-run/checkpoints/step_200""",
    "mvp check": f"""\
examples:
  mvp check sft/lora {_ROWS}
  mvp check my/configs/train.yaml --nproc 2 optim.lr=1e-4

It exits with 0 if the config is ready to train, with 2 if something must be fixed.""",
    "mvp config show": """\
examples:
  mvp config show sft/lora
  mvp config show my/configs/train.yaml optim.lr=1e-4""",
    "mvp config explain": """\
examples:
  mvp config explain optim.lr
  mvp config explain mllm.limits
  mvp config explain learning_rate                  # names of other trainers are answered with ours""",
    "mvp data codes": """\
examples:
  mvp data codes my/configs/speech.yaml                # once, before a training; what is on disk is not made again
  mvp data codes my/configs/speech.yaml mllm.speech.codec=kyutai/mimi""",
    "mvp data inspect": """\
examples:
  mvp data inspect photos.jsonl                     # formats, bad rows, missing files; needs no model
  mvp data inspect photos.jsonl --model Qwen/Qwen3-VL-2B-Instruct --decode
  mvp data inspect hf://org/dataset:train --strict
  mvp data inspect my/configs/train.yaml --row photos.jsonl:17""",
    "mvp chat": """\
examples:
  mvp chat latest                                   # the newest run; a conversation in the terminal
  mvp chat outputs/my-run --image photo.jpg -p "What is in this photo?"
  mvp chat Qwen/Qwen3-0.6B -p "Hello" --temperature 0.7 --json""",
    "mvp merge": """\
examples:
  mvp merge outputs/my-run model                    # the newest checkpoint; LoRA is merged into the base model
  mvp merge outputs/my-run adapter --adapter""",
    "mvp plan": """\
examples:
  mvp plan Qwen/Qwen3-VL-8B-Instruct --tokens 4096 --gpu H100 --gpus 8
  mvp plan sft/lora model.path=Qwen/Qwen3-8B --gpu "RTX 4090"
  mvp plan my/configs/train.yaml --gpus 1024 --gpu H100 --simulate
  mvp plan Qwen/Qwen3-32B parallel.shard=64 parallel.tensor=8 --gpus 1024 --tokens 8192 --ranks 7,33

It needs no GPU. Exit code 2: ranks would hang, or the training does not fit; then the last lines are the cheapest
changes that make it fit.""",
    "mvp doctor": """\
examples:
  mvp doctor
  mvp doctor my/configs/train.yaml                  # also whether its checkpoints fit on the disk""",
    "mvp profile": """\
examples:
  mvp profile my/configs/train.yaml --out profile   # writes a page, a trace and profile.json
  mvp profile outputs/my-run --step 740             # the line that made this step slow""",
    "mvp launch slurm": """\
example:
  mvp launch slurm my/configs/train.yaml --nodes 2 --gpus 8 --sbatch=--partition=gpu > job.sh""",
    "mvp push": """\
examples:
  mvp push latest me/my-model --dry-run
  mvp push outputs/my-run me/my-adapter --adapter""",
    "mvp replay": """\
example:
  mvp replay latest                                 # the run's last skipped or failed step""",
    "mvp recipe new": """\
example:
  mvp recipe new mine --from sft""",
    "mvp runs show": """\
examples:
  mvp runs show                                     # the newest run
  mvp runs show my-run --json""",
    "mvp runs plot": """\
example:
  mvp runs plot my-run other-run --metric loss --out compare.png""",
}


# Commands that run a config on ranks, predict it, or look into its runs: train to replay.

RUN = "a run's folder or id, or latest"


def add_training_commands(commands: Any) -> None:
    """Commands that run a config on one or more ranks."""
    train = add_config_command(commands, "train", "train the model of a config, or resume its run")
    train.set_defaults(run="train")

    text = "evaluate the best checkpoint of a run, or of a config's newest run (or resume=PATH)"
    evaluate = add_config_command(commands, "evaluate", text, f"{CONFIG}; or {RUN}")
    evaluate.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    evaluate.set_defaults(run="evaluate")

    text = (
        "dry-run a config: data, model, a few training steps, one evaluation batch; leaves no files"
    )
    check = add_config_command(commands, "check", text)
    add_json_option(check)
    check.set_defaults(run="check")

    text = "profile steps of a config, or of a run: where their time and memory go, as a page and a trace"
    profile = add_config_command(commands, "profile", text)
    profile.add_argument(
        "--out", default="profile", metavar="DIR", help="output folder (default: profile)"
    )
    profile.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of traced steps (default: 3)"
    )
    text = "first traced step; the ones before it warm up (default: 6)"
    profile.add_argument("--first", type=int, default=6, metavar="N", help=text)
    text = "trace step N of a run, repeated from the nearest checkpoint: CONFIG is then its folder or id, or latest"
    profile.add_argument("--step", type=int, metavar="N", help=text)
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


def add_launch_commands(commands: Any) -> None:
    launch = add_group(commands, "launch", "scripts that start a training on a cluster")
    text = "print an sbatch script, which saves and queues itself again when its time is over"
    slurm = add_config_command(launch, "slurm", text)
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


def add_doctor_command(commands: Any) -> None:
    text = "check this machine: versions, GPUs, kernels, media, disk, all-reduce; each line ok or a fix"
    doctor = add_command(commands, "doctor", text)
    text = "also check the disk and the kernels for this YAML file or shipped config"
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help=text)
    add_overrides(doctor)
    text = "folder of the runs (default: outputs, or project.dir of CONFIG)"
    doctor.add_argument("--dir", metavar="DIR", help=text)
    _add_node_options(doctor, "one per GPU")
    add_json_option(doctor)
    doctor.set_defaults(run="doctor")


def add_plan_command(commands: Any) -> None:
    text = "predict memory and time on GPUs that need not be present; simulate ranks; exit code 2 if it does not fit"
    plan = add_command(commands, "plan", text)
    plan.add_argument(
        "what",
        metavar="CONFIG|MODEL",
        help="a YAML file, a shipped config such as sft/lora, a model folder or a Hub id",
    )
    add_overrides(plan)
    text = "such as H100 or 'RTX 4090' (default: the GPU of this machine, else H200)"
    plan.add_argument("--gpu", metavar="NAME", help=text)
    text = "number of GPUs (default: as many as the parallel layout needs)"
    plan.add_argument("--gpus", type=int, metavar="N", help=text)
    text = "assume full packs of N tokens instead of reading data (default for a MODEL: 8192)"
    plan.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "share of image or audio tokens in assumed packs (default: 0.75)"
    plan.add_argument("--media-share", type=float, default=0.75, metavar="X", help=text)
    text = "run a step of some ranks without values: collectives, hangs, the communication that a step waits for"
    plan.add_argument("--simulate", action="store_true", help=text)
    text = "more ranks to simulate: numbers with commas, or all (default: one of each kind)"
    plan.add_argument("--ranks", metavar="N,N", help=text)
    text = "GPUs that NVLink or PCIe connects (default: 8)"
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help=text)
    text = "network between nodes, in GB/s per GPU and direction (default: 50, 400 Gb/s)"
    plan.add_argument("--network", type=float, default=50.0, metavar="X", help=text)
    add_json_option(plan)
    plan.set_defaults(run="plan")


def add_replay_command(commands: Any) -> None:
    text = "find the rows and the parameter that made a step of a run non-finite, or fail"
    replay = add_command(commands, "replay", text)
    replay.add_argument("name", metavar="RUN", help=RUN)
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="changes to its config")
    text = "the step (default: the last that was skipped or failed; of a streak, its first)"
    replay.add_argument("--step", type=int, metavar="N", help=text)
    text = "processes (default: as many as the run had)"
    replay.add_argument("--nproc", type=int, metavar="N", help=text)
    replay.add_argument("--dir", default="outputs", help="folder of the runs (default: outputs)")
    add_json_option(replay)
    replay.set_defaults(run="replay")
