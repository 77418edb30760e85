"""`mvp`, the command line: its commands and options as text, and the parser that is made from it.

Heavy imports stay inside the commands, so that `mvp --help` imports neither torch nor pydantic.

A command begins with its name and its function, which gets the options as keywords. Then follow a line for its help,
one line per argument, and examples. An argument is written as its help text shows it:

    CONFIG, NAME?, names=RUN*   a positional one, that may be missing, that may come several times in `names`
    --limit N=3, --dir>root D   an option with a default; an option that is called `root` in the function
    --stop TEXT..., --json      an option that may come several times; an option without a value

N, S and PORT are integers, X, T, P and GB floats, lower-case values with | between them choices.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from mvp_engine import __version__, plugins
from mvp_engine.errors import EXIT_USER_ERROR, UserError, did_you_mean
from mvp_engine.process.signals import EXIT_AT_ONCE
from mvp_engine.process.watchdog import ignore_broken_pipes
from mvp_engine.tools.nodes import nodes_of

TEXT = "Fine-tune and pre-train models on text, images, video and audio."
GROUPS = {"data": "inspect training data, or prepare it"}
# What several commands have: @config in the text below.
SHARED = {
    "@config": "a YAML file, or the config of a shipped recipe, such as sft/lora",
    "  @runs": "  --dir>root DIR=outputs  folder of the runs, output_dir",
    "@run": "a run's folder or id, or latest",
    "  @overrides": "  overrides=key=value*  overrides of config keys",
    "  @json": "  --json>as_json  print JSON, for programs",
    "  @nproc": "  --nproc N  processes (ranks) on this machine (default: 1; under srun, one per GPU)",
    "  @nodes": """\
  --nnodes N[:M]          machines that train together; srun sets this and the next three by itself (default: 1).
                          1:2: elastic, it continues with one of two when the other is lost
  --node-rank N           which of them this is, from 0
  --master-addr HOST      host name of node 0
  --master-port PORT      a free port of node 0 (default: 29500)""",
}
OVERVIEW = """\
fine-tune a model on your own rows, in four commands:
  mvp data inspect photos.jsonl --model Qwen/Qwen3-VL-2B-Instruct
  mvp check sft/lora model.path=Qwen/Qwen3-VL-2B-Instruct data.sources.rows.path=photos.jsonl
  mvp sft --model Qwen/Qwen3-VL-2B-Instruct --data photos.jsonl
  mvp chat latest --image photo.jpg -p "What is in this photo?"

mvp COMMAND --help prints the options and examples of a command. Exit codes: 0 done, 1 a bug, 2 a user error,
75 stopped and saved."""
COMMANDS = """
mvp train -> tools.launcher:train
train the model of a config, or resume its run
  CONFIG                  @config
  @overrides
  @nproc
  @nodes
examples:
  mvp train sft/lora model.path=Qwen/Qwen3-VL-2B-Instruct data.sources.rows.path=photos.jsonl
  mvp train my/configs/train.yaml optim.lr=1e-4 train.epochs=2 --nproc 8
  mvp train my/configs/train.yaml resume=auto       # continue the newest run

mvp config --explain KEY prints what a key means, mvp config CONFIG all keys with their values, and
mvp recipe the recipes. A run writes its files to outputs/.

mvp sft|dpo|rm|distil|grpo -> tools.launcher:fine_tune
train a model on your rows with the settings of a shipped config; also mvp dpo, mvp rm (a reward model), mvp distil and
mvp grpo
  @overrides
  --model MODEL           folder or Hub id of the model
  --data FILE             the rows: a file, a folder, or hf://org/dataset
  --eval-data FILE        held-out rows (default: a share of --data)
  --lora                  train adapters (the default, except for distil)
  --qlora                 train adapters on weights in 4 bits
  --full                  train all parameters
  --teacher MODEL         of distil: the model whose predictions are learnt
  --engine FILE           of grpo: the file with your reward, an RLEngine
  @nproc
  @nodes
examples:
  mvp sft --model Qwen/Qwen3-VL-2B-Instruct --data photos.jsonl
  mvp sft --model Qwen/Qwen3-8B --data chats.jsonl --qlora train.epochs=1
  mvp dpo --model Qwen/Qwen3-0.6B --data pairs.jsonl --full optim.lr=1e-6
  mvp grpo --model Qwen/Qwen3-0.6B --data questions.jsonl --engine reward.py

It prints the mvp train command that it stands for: mvp check takes the same config and words.

mvp sweep -> tools.sweep:sweep_command
train a config with several values of some keys, each as a run in a process of its own; the same command continues
  CONFIG                  @config
  @overrides
  --optuna N              N runs with values that Optuna chooses (default: all combinations of the values)
  --prune                 end runs whose evaluations are worse than the median of the others
  --jobs N=1              runs at a time, on GPUs of their own
  --nproc N               processes (ranks) of each run (default: 1)
  @json
examples:
  mvp sweep my/configs/train.yaml optim.lr=1e-5,3e-5,1e-4 "optim.warmup=range(0,30,10)"
  mvp sweep my/configs/train.yaml "optim.lr=tag(log,interval(1e-6,1e-3))" --optuna 20 --prune --jobs 4
  mvp runs serve my-sweep                           # its runs in a browser, by the name that it prints

The runs are compared by checkpoint.best_metric.

mvp evaluate -> tools.launcher:evaluate
evaluate the best checkpoint of a run, or of a config's newest run (or resume=PATH), on held-out rows or on benchmarks
  CONFIG                  @config; or @run
  @overrides
  --tasks NAME,FILE       tasks of lm-eval or lmms-eval, or YAML files in their format, instead of held-out rows
  --limit N               of tasks: only so many of the first examples
  --fewshot N             of tasks: solved examples in the prompt (default: as each task says)
  --system TEXT           of tasks: the system message
  --no-chat-template      of tasks: prompts are plain text (default: user messages, if the model has a chat template)
  @runs
  @nproc
  @nodes
examples:
  mvp evaluate latest                               # the newest run; or a run's folder or id
  mvp evaluate latest --tasks gsm8k,my/task.yaml --limit 200 --nproc 8
  mvp evaluate my/configs/train.yaml
  mvp evaluate my/configs/train.yaml resume=outputs/my-run/checkpoints/step_200

mvp check -> tools.launcher:check
dry-run a config: data, model, a few steps, one evaluation batch; or find the rows and the parameter that made a
step of a run non-finite, or fail; leaves no files
  CONFIG                  @config; or @run
  @overrides
  --step N                the step of the run (default: the last that was skipped or failed; of a streak, its first)
  @runs
  @json
  @nproc
  @nodes
examples:
  mvp check sft/lora model.path=Qwen/Qwen3-VL-2B-Instruct data.sources.rows.path=photos.jsonl
  mvp check my/configs/train.yaml --nproc 2 optim.lr=1e-4
  mvp check latest                                  # the run's last skipped or failed step

It exits with 0 if the config is ready to train, with 2 if something must be fixed.

mvp profile -> tools.launcher:profile
profile steps of a config, or of a run: where their time and memory go, as a page and a trace
  CONFIG                  @config
  @overrides
  --out DIR=profile       output folder
  --steps N=3             number of traced steps
  --first N=6             first traced step; the ones before it warm up
  --step N                trace step N of a run, repeated from the nearest checkpoint: CONFIG is then its folder or
                          id, or latest
  @nproc
  @nodes
examples:
  mvp profile my/configs/train.yaml --out profile   # writes a page, a trace and profile.json
  mvp profile outputs/my-run --step 740             # the line that made this step slow

mvp launch -> tools.launcher:print_script
print the job file of a training on a cluster: it saves when it is preempted, and continues when it is started again
  kind=slurm|k8s|skypilot|ray  what starts the job: sbatch, a JobSet of Kubernetes, SkyPilot, ray job submit
  CONFIG                  @config
  @overrides
  --nodes N=1             number of nodes
  --gpus N=8              GPUs per node
  --cpus N                CPU cores per node
  --time TIME             slurm: as for sbatch (default: 24:00:00)
  --grace S               slurm, k8s: seconds that the training has to save before it is killed (default: 600)
  --sbatch OPTION...      slurm: another option of sbatch, such as --sbatch=--partition=gpu; may be repeated
  --image IMAGE           k8s, skypilot: the container image
  --volume SOURCE:PATH...  k8s, skypilot: where a volume claim, a volume or a bucket is mounted; may be repeated
  --accelerator GPU       skypilot: such as H100
examples:
  mvp launch slurm my/configs/train.yaml --nodes 2 --gpus 8 --sbatch=--partition=gpu > job.sh
  mvp launch k8s my/configs/train.yaml --image mvp-engine --volume runs:/outputs output_dir=/outputs > job.yaml

mvp chat -> cli:chat
chat with a trained model: a run, a Hugging Face folder or a LoRA adapter
  target=RUN|FOLDER|ADAPTER  @run; the folder of a model or an adapter; or a Hub id
  --image FILE...         attached to the first message; may be given several times
  --video FILE...         attached to the first message; may be given several times
  --audio FILE...         attached to the first message; may be given several times
  -p --prompt TEXT        answer this message and exit (default: read messages from the terminal)
  --system TEXT           the system message
  --max-new-tokens N=512  most tokens of an answer
  --temperature T=0       0: greedy decoding
  --top-k N               sample from the N most likely tokens (default: all)
  --top-p P=1             sample from the most likely tokens that have this probability together
  --seed N=0              seed of the sampling
  --stop TEXT...          an answer ends before this text; may be given several times
  @answers
  --device NAME           cpu or cuda (default: a GPU if present)
  @runs
  @json
examples:
  mvp chat latest                                   # the newest run; a conversation in the terminal
  mvp chat outputs/my-run --image photo.jpg -p "What is in this photo?"
  mvp chat Qwen/Qwen3-0.6B -p "Hello" --temperature 0.7 --json

mvp serve -> tools.serve:serve
serve a model by OpenAI's protocol: by vLLM or SGLang where one is installed, else by our own decoding
  target=RUN|FOLDER|MODEL  @run; the folder of a model or an adapter; or a Hub id
  --backend vllm|sglang|own  what answers (default: the first that is installed)
  --host HOST=127.0.0.1   address to listen on; 0.0.0.0: all, without any check of who asks
  --port PORT=8000        0: any free port
  --python PATH           the python of the environment that has vLLM or SGLang (default: this one)
  --name NAME             name of the model in requests (default: that of the run or the folder)
  --max-batch N=64        own: completions in one forward; more requests wait
  --device NAME           own: cpu or cuda (default: a GPU if present)
  @runs
examples:
  mvp serve latest
  mvp serve outputs/my-run --backend vllm --python ~/vllm/bin/python --tensor-parallel-size 2
  mvp serve adapter --port 9000 --backend own

Options that are not listed here go to vLLM or SGLang.

mvp data inspect -> tools.inspect_page:print_inspection
show rows as the model sees them, the tokens with loss, lengths, packing and bad rows
  target=FILE|CONFIG      a data file of any format, hf://org/dataset, or a recipe's YAML file
  @overrides
  --model MODEL           folder or Hub id (org/name) with the processor or tokenizer
  --split SPLIT=train     split of a config's sources
  --row ROW               show only this row, in full: its index from 0, or FILE:LINE
  --limit N               number of rows to show (default: 3; with --html 24)
  --tokens>pack_tokens N=8192  tokens per pack, where a data file is inspected
  --html FILE             write a page: rows with their images, frames and audio, and the tokens with loss
  --decode                decode all media, which finds corrupt files
  --strict                exit with 2 if a row is bad or dropped, as a check before a training
  @json
examples:
  mvp data inspect photos.jsonl                     # formats, bad rows, missing files; needs no model
  mvp data inspect photos.jsonl --model Qwen/Qwen3-VL-2B-Instruct --decode
  mvp data inspect photos.jsonl --html rows.html    # rows with their images
  mvp data inspect hf://org/dataset:train --strict
  mvp data inspect my/configs/train.yaml --row photos.jsonl:17

mvp data prepare -> tools.prepare:prepare
tokenize the rows of a config once, on all cores, into a folder that trainings read in place of its sources
  CONFIG                  @config
  OUT                     the folder to write; one that was interrupted is continued
  @overrides
  --ray ADDRESS           on the machines of this Ray cluster (auto: the one of this machine), which see the same files
  @json
examples:
  mvp data prepare my/configs/train.yaml prepared
  mvp train my/configs/train.yaml data.sources=prepared

mvp plan -> cli:plan
predict memory and time on GPUs that need not be present; simulate ranks; exit code 2 if it does not fit
  what=CONFIG|MODEL       a YAML file, a shipped config such as sft/lora, a model folder or a Hub id
  @overrides
  --gpu NAME              such as H100 or 'RTX 4090' (default: the GPU of this machine, else H200)
  --gpus N                number of GPUs (default: as many as the parallel layout needs)
  --tokens N              assume full packs of N tokens instead of reading data (default for a MODEL: 8192)
  --media-share X=0.75    share of image or audio tokens in assumed packs
  --simulate              run a step of some ranks without values: collectives, hangs, the communication that a step
                          waits for
  --ranks N,N             more ranks to simulate: numbers with commas, or all (default: one of each kind)
  --gpus-per-node N=8     GPUs that NVLink or PCIe connects
  --network X=50          network between nodes, in GB/s per GPU and direction (400 Gb/s are 50)
  @json
examples:
  mvp plan Qwen/Qwen3-VL-8B-Instruct --tokens 4096 --gpu H100 --gpus 8
  mvp plan sft/lora model.path=Qwen/Qwen3-8B --gpu "RTX 4090"
  mvp plan my/configs/train.yaml --gpus 1024 --gpu H100 --simulate
  mvp plan Qwen/Qwen3-32B parallel.shard=64 parallel.tensor=8 --gpus 1024 --tokens 8192 --ranks 7,33

It needs no GPU. Exit code 2: ranks would hang, or the training does not fit; then the last lines are the cheapest
changes that make it fit.

mvp doctor -> cli:doctor
check this machine: versions, GPUs, kernels, media, disk, all-reduce; each line ok or a fix
  CONFIG?                 also check the disk and the kernels for this YAML file or shipped config
  @overrides
  --models                instead: list the model types of transformers and what each supports; with a model type
                          (model_type in its config.json) in place of CONFIG, also why not
  --dir>folder DIR        folder of the runs (default: outputs, or output_dir of CONFIG)
  --nproc N               processes (ranks) on this machine (default: one per GPU)
  @nodes
  @json
examples:
  mvp doctor
  mvp doctor my/configs/train.yaml                  # also whether its checkpoints fit on the disk
  mvp doctor --models qwen3                         # what this model type supports, and why not the rest

mvp config -> tools.config:config_command
print a config with all its values as YAML, its JSON Schema, or what a key means
  CONFIG?                 @config
  @overrides
  --explain KEY           type, default and meaning of a key or a section, such as optim.lr; with CONFIG also of its
                          recipe's keys
  --schema                print the JSON Schema of CONFIG
  --reference             print a Markdown page of all keys, with CONFIG those of its recipe
examples:
  mvp config sft/lora
  mvp config my/configs/train.yaml optim.lr=1e-4
  mvp config --explain optim.lr
  mvp config --explain data.limits
  mvp config --explain learning_rate                # names of other trainers are answered with ours

mvp recipe -> tools.recipe:recipe_command
list the recipes, create one as a copy of another, or install the skills for coding agents
  NAME?                   a new recipe: letters, digits and underscores (default: list all recipes)
  --from>origin RECIPE    the recipe to copy, by name or folder; the copy runs at once
  --skills                copy the skills to .agents/skills, and link them in .claude/skills
  --dir>folder DIR        parent folder of a new recipe (default: recipes/ if it exists, else .); with --skills the
                          project's folder (default: .); ~ for all projects
  --force                 replace skills of the same names
  @json
examples:
  mvp recipe                                        # all recipes, each with a sentence on it
  mvp recipe mine --from sft
  mvp recipe --skills --dir ~                       # skills for coding agents, in all projects

mvp runs -> tools.runs:runs_command
list all runs, show one, compare two, plot a metric of some, or serve a live page of them
  names=RUN*              @run. None: list all runs, oldest first; one: its status, metrics and checkpoints; two:
                          what differs in their configs and last metrics; serve and any runs: a page on this machine
                          that refreshes while they train
  --plot METRIC           plot a metric of the runs, such as loss
  --out PNG               file of the plot (default: METRIC.png in the first run's folder)
  --port PORT=6007        of serve, on 127.0.0.1; 0: one that is free
  @runs
  @json
examples:
  mvp runs                                          # all runs
  mvp runs latest --json
  mvp runs my-run other-run                         # what differs
  mvp runs my-run other-run --plot loss --out compare.png
  mvp runs serve                                    # the newest run in a browser, refreshed every 2 s

mvp export -> tools.merge:export_command
write the model of a run or a checkpoint as a Hugging Face folder, on a CPU (of a plain module: a state dict), or upload
it to the Hugging Face Hub, with a model card
  CHECKPOINT              a checkpoint, or @run (its best one)
  OUT?                    the folder to write
  --push>name ORG/NAME    upload to this repository on the Hub, created if it does not exist; private
  --adapter               LoRA: only the adapter, in peft's format
  --verify transformers|vllm|peft  compare the export with how this library reads it: prompts, greedy tokens and
                          log-probs on rows of the run; without OUT, it is removed afterwards. Exit code 2: they differ
  --gguf f32|f16|bf16|q8_0  write GGUF files for llama.cpp and Ollama into OUT instead, by llama.cpp's converter
  --llama-cpp DIR         --gguf: a folder with the converter, convert_hf_to_gguf.py
  --python PATH           --verify vllm: the python of the environment that has vLLM (default: this one)
  --dtype float32|bfloat16|float16  dtype of the weights in OUT (default: that of the pretrained folder)
  --max-file-gb GB=5      largest size of one weight file
  --engine FILE           file or module that registers a custom model type, if it moved since training
  --base MODEL            LoRA: folder or Hub id of the base model, if it moved
  --ema                   write the EMA weights (optim.ema), not the last ones
  --public                --push: a public repository
  --license NAME          --push: license in the model card (default: that of the base model)
  --dry-run               --push: print files and card, upload nothing
  @runs
  @json
examples:
  mvp export latest model                           # a complete folder; LoRA is merged into the base model
  mvp export outputs/my-run adapter --adapter
  mvp export latest model --verify transformers
  mvp export latest gguf --gguf q8_0 --llama-cpp ~/llama.cpp
  mvp export latest --push me/my-model --dry-run
"""

# Earlier spellings of commands, and what they are now.
MOVED = {
    "config show": "mvp config CONFIG",
    "config schema": "mvp config CONFIG --schema",
    "config explain": "mvp config --explain KEY",
    "config reference": "mvp config --reference",
    "recipe list": "mvp recipe",
    "recipe new": "mvp recipe NAME --from RECIPE",
    "runs list": "mvp runs",
    "runs show": "mvp runs RUN",
    "runs plot": "mvp runs RUN --plot METRIC",
    "runs diff": "mvp runs RUN RUN",
    "skills": "mvp recipe --skills",
    "replay": "mvp check RUN",
    "estimate": "mvp plan CONFIG",
    "models": "mvp doctor --models [NAME]",
    "merge": "mvp export RUN OUT",
    "push": "mvp export RUN --push ORG/NAME",
}


def moved_command(words: list[str]) -> str | None:
    """What to say about an earlier spelling of a command; None for all others."""
    for old in (" ".join(words[:2]), words[0]):
        if old in MOVED:
            return f"`mvp {old}` is now `{MOVED[old]}`"
    return None


# ---- The parser -------------------------------------------------------------------------------------

TYPES = {"N": int, "S": int, "PORT": int, "X": float, "T": float, "P": float, "GB": float}


DATA_COMMAND = "tools.inspect:run_data_command"  # of plug-ins
METHODS = "tools.launcher:fine_tune"  # its name says the method
SERVE = "tools.serve:serve"


class Command(NamedTuple):
    """A command as `COMMANDS` describes it."""

    name: str  # with its group: data inspect
    run: str
    help: str
    arguments: list[str]
    epilog: str


def read_commands() -> Iterator[Command]:
    of_kits = [command.usage for command in plugins.load_all("data_command").values()]
    answers = [option.usage.strip("\n") for option in plugins.load_all("chat_option").values()]
    text = "\n\n".join(text.strip("\n") for text in (COMMANDS, *of_kits))
    text = text.replace("  @answers\n", "".join(f"{lines}\n" for lines in answers))
    for name, shared in SHARED.items():
        text = text.replace(name, shared)
    for block in re.split(r"\n\n(?=mvp [a-z| ]+ -> )", text.strip("\n")):
        head, _, rest = block.partition("\n")
        name, _, run = head.removeprefix("mvp ").partition(" -> ")
        body, epilog = re.split(r"(?=^examples?:)|\Z", rest, maxsplit=1, flags=re.M)
        help_text, *arguments = re.split(r"\n  (?=\S)", body.rstrip("\n"))
        words = [" ".join(text.split()) for text in (help_text, *arguments)]
        yield Command(name, run, words[0], arguments, epilog)


def build_parser() -> argparse.ArgumentParser:
    parser = HintingParser(prog="mvp", description=TEXT, epilog=OVERVIEW)
    parser.add_argument("--version", action="version", version=f"mvp_engine {__version__}")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    groups = {"": commands}
    for command in read_commands():
        group, _, names = command.name.rpartition(" ")
        name, *aliases = names.split("|")
        if group not in groups:
            added = commands.add_parser(group, help=GROUPS[group], description=GROUPS[group])
            groups[group] = added.add_subparsers(required=True, metavar="COMMAND")
        texts = {"help": command.help, "description": command.help, "epilog": command.epilog}
        added = groups[group].add_parser(name, aliases=aliases, **texts)
        added.set_defaults(run=command.run, parser=added)  # it reports unknown options
        if command.run == DATA_COMMAND:
            added.set_defaults(name=name)
        for argument in command.arguments:
            _add_argument(added, argument)
    return parser


def _add_argument(command: argparse.ArgumentParser, text: str) -> None:
    spec, _, rest = text.partition("  ")
    words = spec.split()
    settings: dict[str, Any] = {"help": " ".join(rest.split())}
    if not spec.startswith("-"):
        name, equals, metavar = spec.rstrip("?*").partition("=")
        if spec[-1] in "?*":
            settings |= {"nargs": spec[-1], "default": [] if spec[-1] == "*" else None}
        if "|" in metavar and metavar.islower():
            settings["choices"] = metavar.split("|")
        command.add_argument(name if equals else name.lower(), metavar=metavar or name, **settings)
        return
    flags = [word for word in words if word.startswith("-")]
    flags[-1], _, name = flags[-1].partition(">")
    if name:
        settings["dest"] = name
    if len(words) == len(flags):
        command.add_argument(*flags, action="store_true", **settings)
        return
    metavar, _, default = words[-1].partition("=")
    kind = TYPES.get(metavar, str)
    settings["type"] = kind
    if default:
        settings["default"] = kind(default)
        settings["help"] += f" (default: {default})"
    if "|" in metavar:
        settings["choices"] = metavar.split("|")
    elif metavar.endswith("..."):
        settings |= {"action": "append", "default": [], "metavar": metavar[:-3]}
    else:
        settings["metavar"] = metavar
    command.add_argument(*flags, **settings)


RENAMED = {"estimate": "plan"}  # commands of earlier versions


class HintingParser(argparse.ArgumentParser):
    """argparse, with examples in its help, and what was probably meant in its error messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)

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
        from mvp_engine.config.compose import suggest_key
        from mvp_engine.kit.settings import MLLMConfig

        key = suggest_key(word.lstrip("-").replace("-", "_"), MLLMConfig)
        fix = "" if key.startswith("Known keys") else f" {key}"
        return f" Config keys are written as key=value, without dashes.{fix}"


def main(argv: list[str] | None = None) -> int:
    ignore_broken_pipes()
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    if not words:
        parser.print_help()
        return EXIT_USER_ERROR
    if new := moved_command(words):
        parser.error(new)
    args, rest = parser.parse_known_args(words)
    # argparse stops collecting key=value words at the first option after them; here they may stand anywhere.
    if args.run == SERVE:  # options that it does not have are those of the server that it starts
        args.server_options = rest
    elif not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
        if rest:
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        args.overrides += rest
    options = vars(args)
    del options["parser"]
    if args.run != METHODS:
        del options["command"]
    try:
        return call(**options)
    except UserError as error:
        print(f"mvp: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:  # of a command that has nothing to save
        print("mvp: interrupted", file=sys.stderr)
        return EXIT_AT_ONCE


def call(run: str, **options: Any) -> int:
    """Call `module:function` of the package with the options of the command."""
    module, _, function = run.partition(":")
    found = getattr(importlib.import_module(f"mvp_engine.{module}"), function)
    return int(found(**options) or 0)


def doctor(
    config: str | None,
    overrides: list[str],
    *,
    models: bool,
    folder: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    if models:
        return call("tools.models:print_models", name=config, as_json=as_json)
    from mvp_engine.config import compose
    from mvp_engine.tools import doctor

    if config is not None:
        compose(config, overrides)
    nodes, nproc = nodes_of(argparse.Namespace(**options)), options["nproc"]
    request = doctor.Request(config, overrides, folder)
    return doctor.doctor(request, nodes, nproc, as_json=as_json)


def plan(what: str, overrides: list[str], *, as_json: bool, **options: Any) -> int:
    from mvp_engine.kit.plan.planner import Question
    from mvp_engine.tools.plan import print_plan

    return print_plan(Question(what, overrides, **options), as_json=as_json)


def chat(target: str, root: str, **options: Any) -> int:
    from mvp_engine.kit.decoding import Decoding
    from mvp_engine.tools import chat

    names = ("temperature", "top_k", "top_p", "seed")
    decoding = Decoding(options["max_new_tokens"], **{name: options[name] for name in names})
    return chat.chat(
        target,
        root=root,
        media=[(kind, file) for kind in chat.KINDS for file in options[kind]],
        prompt=options["prompt"],
        system=options["system"],
        decoding=decoding,
        stop_strings=options["stop"],
        device=options["device"],
        as_json=options["as_json"],
        output=chat.output_of(options),
    )


if __name__ == "__main__":
    sys.exit(main())
