"""Examples below the help texts of `mvp` and its commands, by the program name of their parsers."""

from __future__ import annotations

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
    "mvp estimate": """\
examples:
  mvp estimate Qwen/Qwen3-VL-8B-Instruct --tokens 4096 --gpu H100 --gpus 8
  mvp estimate sft/lora model.path=Qwen/Qwen3-8B --gpu "RTX 4090"

If the training does not fit, the last lines are the cheapest changes that make it fit.""",
    "mvp plan": """\
examples:
  mvp plan my/configs/train.yaml --gpus 1024 --gpu H100
  mvp plan Qwen/Qwen3-32B parallel.shard=64 parallel.tensor=8 --gpus 1024 --tokens 8192
  mvp plan my/configs/train.yaml --gpus 64 --ranks 7,33 --json

It needs no GPU. Exit code 2: ranks would hang, or the training does not fit.""",
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
