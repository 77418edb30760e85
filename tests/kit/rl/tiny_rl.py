"""A tiny RL recipe in a folder: a random Qwen3 policy, prompts with answers, and a reward of the test's own."""

import textwrap

import torch
import transformers as hf
from templates.tiny import tokenizer
from tiny_vlm import TEXT, write

ENGINE = """
from mvp_engine.kit.rl import RLEngine


class Tiny(RLEngine):
    def reward(self, row, answer):
{body}
"""
CONFIG = """
run_name: tiny
output_dir: {folder}/outputs
device: cpu
cpu_threads: 1
model: {{type: language_model, path: {folder}/model}}
data:
  pack_tokens: 256
  cache: {folder}/cache
  sources: [{{path: {folder}/rows.jsonl}}, {{path: {folder}/rows.jsonl, name: held_out, split: eval}}]
  num_workers: 0
rl: {{prompts_per_step: 4, num_generations: 2}}
generation: {{max_new_tokens: 4}}
reward: {{workers: 1, max_errors: 0.5}}
train: {{max_steps: 2}}
optim: {{lr: 1.0e-3, schedule: constant}}
log: {{backends: [jsonl], interval: 1}}
checkpoint: {{best_metric: null}}
"""


def write_recipe(folder, reward):
    """Write the recipe with this body of `reward(self, row, answer)`; returns its config file."""
    (folder / "engine.py").write_text(
        ENGINE.format(body=textwrap.indent(textwrap.dedent(reward), " " * 8))
    )
    (folder / "train.yaml").write_text(CONFIG.format(folder=folder))
    write(folder / "rows.jsonl", [{"prompt": f"say {i}", "answer": f"{i}"} for i in range(8)])
    words = tokenizer("qwen2_5")
    torch.manual_seed(0)
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, initializer_range=0.5)).save_pretrained(
        folder / "model"
    )
    words.save_pretrained(folder / "model")
    return str(folder / "train.yaml")
