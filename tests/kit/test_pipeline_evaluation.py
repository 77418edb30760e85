"""Evaluations that compute their loss at the end (preference, contrastive), on pipeline stages: equal to one rank."""

import pytest
import transformers as hf
from conftest import read_metrics
from templates.tiny import tokenizer
from tiny_vlm import TEXT, write

from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
SHARED = """
cpu_threads: 1
train: {max_steps: 1, precision: fp32}
eval: {steps: 1}
log: {interval: 1, backends: [jsonl]}
checkpoint: {best_metric: null}
"""
PAIRS = """
engine: preference
model: {type: language_model, path: FOLDER/model, compile: null}
preference: {loss: orpo}
data:
  pairs: true
  pack_tokens: 128
  sources: [{path: FOLDER/rows.jsonl}, {path: FOLDER/rows.jsonl, split: eval}]
  global_batch_size: 2
  num_workers: 0
"""
VIEWS = """
engine: views.py:Views
model:
  type: language_model
  config: {model_type: qwen3, vocab_size: 400, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}
data: {micro_batch_size: 3, global_batch_size: 6}
towers: {width: 1, embedding: 1}
"""
ENGINE = """
import torch
from mvp_engine.data.batch import PackedBatch
from mvp_engine.config.engine_class import SHIPPED
from mvp_engine.engine import Engine
from mvp_engine.imports import import_file

NumbersEngine = import_file(SHIPPED / "contrastive" / "engine.py").NumbersEngine

class Views(NumbersEngine):
    prepare_model = Engine.prepare_model

    def scalars(self):
        return {}

    def prepare_dataloader(self, split):
        rows = [PackedBatch.from_sequences([torch.arange(i, 2 * i + 3), torch.arange(i + 2)]) for i in range(6)]
        return self.sample_loader(rows, split, collate_fn=PackedBatch.concat)

    def embed(self, batch):
        hidden_TD = self.model(batch, ["hidden_states"])["hidden_states"]
        return torch.nn.functional.normalize(hidden_TD[batch.cu_seqlens[1:].long() - 1], dim=-1).unflatten(0, (-1, 2))
"""


@pytest.mark.parametrize("kind", ["pairs", "views"])
def test_evaluation_on_pipeline_stages_has_the_metrics_of_one_rank(ranks2, tmp_path, kind):
    """The NLL of preferred answers is added to the loss, and a contrastive loss computed, after the last batch."""
    if kind == "pairs":
        write(
            tmp_path / "rows.jsonl",
            [{"prompt": "hello", "chosen": "four", "rejected": "the sum"}] * 6,
        )
        hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**TEXT)).save_pretrained(
            tmp_path / "model"
        )
        tokenizer("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "views.py").write_text(ENGINE)
    config = tmp_path / "train.yaml"
    config.write_text(
        (PAIRS if kind == "pairs" else VIEWS).replace("FOLDER", str(tmp_path)) + SHARED
    )
    assert launch(str(config), [f"output_dir={tmp_path}/one"]) == 0
    words = [f"output_dir={tmp_path}/two", "parallel.pipeline=2"]
    assert set(ranks2.launch(config, *words)) == {0}
    (one,), (two,) = (read_metrics(tmp_path / folder, "eval") for folder in ("one", "two"))
    assert one.pop("split") == two.pop("split")
    assert two == pytest.approx(one, rel=1e-5)
