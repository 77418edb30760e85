"""The columns of the model matrix for types with media: Ulysses, tensor parallel, LoRA and export, on rows of the data
kit. Each check returns True, or the reason why the model type does not support it."""

import pickle
import tempfile
from pathlib import Path

import torch
from model_sweep import worst_difference
from sweep_columns import compare_ranks, outputs_and_gradients, random_adapters, tensors_or_reason
from vlm_sweep import TOLERANCE, own_log_probs, random_model
from vlm_tiny import special_of, tiny_config, tiny_processor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError

# Their export is tried in tests/kit/speech/speech_sweep.py.
WHOLE_FOLDERS = (
    "qwen2_5_omni",
    "qwen3_omni_moe",
)
CANNOT_READ = "transformers finds no weights in folders of this type that it saved itself"


def columns(name, rows, pool):
    """All columns of a type that is exact. `pool`: two ranks."""
    found = {"lora": lora(name, rows)}
    for column in ("ulysses", "tensor"):
        found[column] = on_two_ranks(name, rows, pool, **{column: 2})
    found["export"] = True if name in WHOLE_FOLDERS else export(name, rows)
    return found


def build(name):
    return random_model(tiny_config(name, tiny_processor(name)), special_of(name).noise)


def lora(name, rows):
    """Adapters on the text layers: packed text and media stay exact, and the adapters get gradients."""
    model = build(name)
    adapters = random_adapters(model)
    if isinstance(adapters, str):
        return adapters
    found = []
    for batches in ([PackedBatch.concat(rows.ones)], rows.ones):
        model.zero_grad()
        log_probs = torch.cat([model(batch, ["log_probs"])["log_probs"] for batch in batches])
        (log_probs.sum() / 100).backward()
        grads = {key: param.grad for key, param in adapters.items() if param.grad is not None}
        found.append({"log-probs": log_probs.detach(), **grads})
    if not any(bool(grad.any()) for key, grad in found[0].items() if key != "log-probs"):
        return "the adapters get no gradients"
    difference = worst_difference(*found)
    return (
        True
        if difference <= TOLERANCE
        else f"adapters: packed rows differ from single ones by {difference:.1e}"
    )


def export(name, rows):
    """A folder that transformers reads without missing or unexpected tensors, with the log-probs of this model."""
    model = build(name)
    with tempfile.TemporaryDirectory() as parent, torch.no_grad():
        folder = Path(parent) / "exported"
        try:
            model.engine_adapter().export(folder, None, World.join("cpu"))
        except UserError as error:
            return str(error)
        read, problems = _read(type(model.hf), folder)
        if problems:
            model._skeleton(type(model.hf)).to_empty(device="cpu").save_pretrained(
                Path(parent) / "saved"
            )
            is_own = bool(_read(type(model.hf), Path(parent) / "saved")[1])
            return (
                CANNOT_READ if is_own else f"transformers reads the exported folder with {problems}"
            )
        own = torch.cat([model(rows.ones[i], ["log_probs"])["log_probs"] for i in rows.runnable])
        expected = torch.cat(
            [own_log_probs(read.eval(), rows.ones[i], rows.given[i]) for i in rows.runnable]
        )
    difference = float((own - expected).abs().max())
    return (
        True
        if difference <= TOLERANCE
        else f"log-probs of the exported folder differ by {difference:.1e}"
    )


def _read(model_class, folder):
    """The model in a folder, and the tensors that are missing or unexpected."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, loading = model_class.from_pretrained(folder, **options)
    return model, {key: sorted(map(str, names)) for key, names in loading.items() if names}


def on_two_ranks(name, rows, pool, **sizes):
    """Whether a layout of the two ranks of `pool` gives the log-probs and gradients of one."""
    batch = PackedBatch.concat(rows.ones)
    answers = pool.run(_on_layout, name, pickle.dumps(batch), sizes, timeout=120.0)
    expected = outputs_and_gradients(build(name), Layout(World.join("cpu")), batch)
    return compare_ranks(answers, expected, sizes)


def _on_layout(name, batch, sizes):
    return tensors_or_reason(
        lambda layout: outputs_and_gradients(build(name), layout, pickle.loads(batch)), sizes
    )
