"""One trial of a model type from rows to gradients: the data kit, packed batches, and transformers' own forward."""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from test_families_kit import file_of, opened
from test_media import processor_outputs
from vlm_tiny import special_of, tiny_config, tiny_processor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.preflight import MediaPreflight, check_packing
from mvp_engine.kit import MLLMData, MLLMDataKit

TOLERANCE = 1e-5
VERBOSE = bool(os.environ.get("VERBOSE"))


class NotTinyError(Exception):
    """A config that the rules of vlm_tiny.py do not make small."""


@dataclass
class Trial:
    """What a type did: exact, refused (a user error), wrong (differences that no check found) or crashed."""

    name: str
    outcome: str
    kinds: str = ""
    reason: str = ""
    rows: Rows | None = None


@dataclass
class Rows:
    """Rows of the data kit, the outputs of the processor for each, and the rows that transformers can run."""

    kinds: list[str]
    ones: list[PackedBatch]
    given: list[dict[str, Any]]
    runnable: list[int] = field(default_factory=list)


def types():
    """All image-text types of the installed transformers, and those for audio."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    names = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    # Decoder-only models among the encoder-decoders: Audio Flamingo.
    others = [
        name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if name in hf.CONFIG_MAPPING
    ]
    names |= {
        name
        for name in others
        if getattr(hf.CONFIG_MAPPING[name], "is_encoder_decoder", True) is False
    }
    return sorted(names - {"mistral4"})  # listed there, but text only: see tests/hf/model_sweep.py


def try_type(name):
    try:
        processor = tiny_processor(name)
        config = tiny_config(name, processor)
    except Exception:  # noqa: BLE001 - any error is the result of a trial
        if VERBOSE:
            traceback.print_exc()
        return Trial(name, "no tiny model", reason=_last_line())
    try:
        rows = check_type(config, processor, special_of(name).noise)
    except UserError as error:
        if VERBOSE:
            traceback.print_exc()
        return Trial(name, "refused", reason=str(error))
    except NotTinyError as error:
        return Trial(name, "no tiny model", reason=str(error))
    except AssertionError as error:
        return Trial(name, "wrong", reason=str(error))
    except Exception:  # noqa: BLE001 - any error is the result of a trial
        if VERBOSE:
            traceback.print_exc()
        return Trial(name, "crashed", reason=_last_line())
    return Trial(name, "exact", ", ".join(rows.kinds), rows=rows)


def _last_line():
    kind, error, trace = sys.exc_info()
    frames = traceback.extract_tb(trace)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
    return f"{kind.__name__ if kind else ''}: {error} ({' '.join(places)})"


def check_type(config, processor, noise):
    """Raise unless rows with media are exact through the data kit; returns them."""
    model = random_model(config, noise)
    check_packing(model)
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows_of(model, processor, Path(folder))
    compare(model, rows)
    return rows


def random_model(config, noise=0.1):
    """No weight is zero, and all media change the outputs by far more than the tolerance."""
    with torch.device("meta"):
        size = sum(
            param.numel() for param in LanguageModel.from_config(copy.deepcopy(config)).parameters()
        )
    if size > 3_000_000:
        raise NotTinyError(f"{size} parameters")
    torch.manual_seed(0)
    model = LanguageModel.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param += noise * torch.randn_like(param)
    return model.eval()


def _rows_of(model, processor, folder):
    """Rows with the media that the model takes, from files."""
    settings = {
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "pack_tokens": 32768,
    }
    settings |= {
        "global_batch_tokens": 32768,
        "cache": str(folder / "cache"),
        "max_bad_rows": 0.0,
    }
    (folder / "rows.jsonl").write_text(json.dumps(_row([], "Hello.", "Hi.")) + "\n")
    kit = MLLMDataKit(MLLMData.model_validate(settings), processor, model_config=model.hf.config)
    kinds = kit.row_encoder.media.kinds
    # That of the files: the processor's own call does not resample.
    rate = kit.row_encoder.media.sampling_rate
    if not kinds:
        raise UserError("the data kit finds no media in this processor")
    items = [[]]
    for kind in kinds:
        items += [[(kind, 0)], [(kind, 1), (kind, 0)]]
    if len(kinds) > 1:
        items.append([(kind, 2) for kind in kinds])
    rows, media = [], []
    for i, of_row in enumerate(items):
        blocks = [
            {"type": kind, kind: file_of(folder, kind, n, rate), "fps": 2.0} for kind, n in of_row
        ]
        media.append([opened(folder, block["type"], block[block["type"]]) for block in blocks])
        rows.append(_row(blocks, f"What is {i}?", f"It is {i}."))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kit = MLLMDataKit(MLLMData.model_validate(settings), processor, model_config=model.hf.config)
    (pack,) = kit.loader("train")
    order = pack.sequence_fields["sample"].tolist()
    assert sorted(order) == list(range(len(rows))), f"{kit.loader('train')}: rows are missing"
    ones = [pack.select([order.index(i)]) for i in range(len(rows))]
    kinds, kept = _kinds_of_model(model, kinds, items, ones)
    ones, rows, media = ([values[i] for i in kept] for values in (ones, rows, media))
    given, known = [], []
    for i, (row, of_row) in enumerate(zip(rows, media, strict=True)):
        try:
            given.append(own_inputs(processor, row, of_row))
        except ValueError:
            if len(of_row) < 2:  # some processors take one item per text
                raise
            continue
        if len(of_row) > 1 and _sounds_change(processor, given[-1], row, of_row):
            given.pop()
            continue
        known.append(i)
    ones = [ones[i] for i in known]
    for one, inputs in zip(ones, given, strict=True):
        assert one.input_ids.tolist() == inputs["input_ids"][0].tolist(), (
            "tokens differ from the processor's"
        )
    return Rows(kinds, ones, given)


def _row_of(row, item):
    """The row with one of its media."""
    blocks = row["messages"][0]["content"]
    return _row([blocks[item]], blocks[-1]["text"], row["messages"][1]["content"])


def _sounds_change(processor, together, row, media):
    """Whether the last frames of sounds change with other sounds of the call, as where waveforms are padded.

    The data kit calls processors for one sound at a time.
    """
    mask = together.get("feature_attention_mask")
    sounds = [item for item, (info, _) in enumerate(media) if info.kind == "audio"]
    if "input_features" not in together or len(sounds) < 2:
        return False
    sizes = together["input_features"].shape[1:]
    masks = [
        value
        for name, value in together.items()
        if name.endswith("_mask") and value.shape[-1] in sizes
    ]
    if mask is None and masks:
        return False
    for place, item in enumerate(sounds):
        alone = own_inputs(processor, _row_of(row, item), [media[item]])["input_features"][0]
        if mask is None and alone.shape != sizes:
            return True  # its encoder sees the padding of shorter sounds
        length = alone.shape[1] if mask is None else int(mask[place].sum())
        if not torch.equal(together["input_features"][place][:, :length], alone[:, :length]):
            return True
    return False


def _kinds_of_model(
    model,
    kinds,
    items,
    ones,
):
    """The kinds of media that pass the preflight, and the rows without others."""
    problems = {}
    for kind in kinds:
        chosen = [
            one
            for one, of_row in zip(ones, items, strict=True)
            if {name for name, _ in of_row} == {kind}
        ]
        preflight = MediaPreflight(model)
        try:
            preflight.check(preflight.unchecked(chosen), exact=True, reference=True)
        except UserError as error:
            problems[kind] = str(error)
    if len(problems) == len(kinds):
        raise UserError("; ".join(problems.values()))
    kept = [
        i for i, of_row in enumerate(items) if not {name for name, _ in of_row} & problems.keys()
    ]
    return [kind for kind in kinds if kind not in problems], kept


def _row(blocks, question, answer):
    content = [*blocks, {"type": "text", "text": question}] if blocks else question
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    }


def own_inputs(processor, row, media):
    """The outputs of the processor for a whole row."""
    shown = []
    for message in row["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                block if block["type"] == "text" else {"type": block["type"]} for block in content
            ]
        shown.append({**message, "content": content})
    if processor.chat_template is None:
        return own_format(processor, shown, media)
    text = processor.apply_chat_template(
        shown, chat_template=processor.chat_template, tokenize=False
    )
    if not media:  # some processors need an image
        return dict(processor.tokenizer([text], add_special_tokens=False, return_tensors="pt"))
    outputs = processor_outputs(
        processor, text, [info for info, _ in media], [item for _, item in media]
    )
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            outputs[name] = value.float()  # some return bf16
    if "mm_token_type_ids" in processor.model_input_names and "mm_token_type_ids" not in outputs:
        types = processor.create_mm_token_type_ids(outputs["input_ids"].tolist())
        outputs["mm_token_type_ids"] = torch.tensor(types)
    return outputs


def own_format(processor, shown, media):
    """The outputs of a processor that formats a prompt and its answer itself."""
    content, answer = (message["content"] for message in shown)
    if not media:  # it needs an image: the same text without one
        tokenizer = processor.tokenizer
        texts = [f"{tokenizer.bos_token}{content}\n", f"{answer}{tokenizer.eos_token}"]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        types = [0] * len(ids[0]) + [1] * len(ids[1])
        return {
            "input_ids": torch.tensor([ids[0] + ids[1]]),
            "token_type_ids": torch.tensor([types]),
        }
    text = processor.image_token * len(media) + content[-1]["text"]
    found = dict(
        processor(
            images=[[item for _, item in media]], text=[text], suffix=[answer], return_tensors="pt"
        )
    )
    del found["labels"]
    return found


def compare(model, rows):
    """Log-probs and gradients: packed, alone, and by transformers' own model with its own attention code."""
    ones = rows.ones
    own, own_grads = _transformers(model, rows)
    _assert_close(
        "packed and alone: log-probs of all",
        _ours(model, [PackedBatch.concat(ones)])[0],
        _ours(model, ones)[0],
    )
    ones = [ones[i] for i in rows.runnable]
    alone, alone_grads = _ours(model, ones)
    packed, packed_grads = _ours(model, [PackedBatch.concat(ones)])
    _assert_close("packed and alone: log-probs", packed, alone)
    _assert_close("packed and transformers: log-probs", packed, own)
    for name in {*own_grads, *packed_grads, *alone_grads}:
        # A gradient may be zero up to rounding, such as of keys that are alone.
        zero = torch.zeros(())
        grad = packed_grads.get(name, zero)
        _assert_close(f"packed and alone: gradient of {name}", grad, alone_grads.get(name, zero))
        _assert_close(
            f"packed and transformers: gradient of {name}", grad, own_grads.get(name, zero)
        )
    encoders = [
        name for name in own_grads if not name.startswith(("model.language_model", "lm_head"))
    ]
    assert encoders, "no encoder has a gradient"


def _assert_close(what, computed, expected):
    difference = float((computed - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert difference <= TOLERANCE, f"{what} differ by {difference:.1e}"


def _ours(model, batches):
    model.zero_grad()
    found = []
    for batch in batches:
        log_probs = model(batch, ["log_probs"])["log_probs"]
        (log_probs.sum() / 100).backward()
        found.append(log_probs.detach())
    return torch.cat(found), _grads(model.hf)


def _transformers(model, rows):
    """The same from a plain model of transformers, with the outputs of its processor, of the rows that it can run."""
    config = copy.deepcopy(model.hf.config)
    config._attn_implementation = "eager"
    plain = type(model.hf)(config).eval()
    plain.load_state_dict(model.hf.state_dict())
    found = []
    for i, (one, inputs) in enumerate(zip(rows.ones, rows.given, strict=True)):
        try:
            log_probs = own_log_probs(plain, one, inputs)
        except (ValueError, IndexError):
            if i < len(rows.ones) - 1:  # the last row has media of several kinds
                raise
            continue  # transformers itself cannot run this model on media of several kinds
        (log_probs.sum() / 100).backward()
        found.append(log_probs.detach())
        rows.runnable.append(i)
    return torch.cat(found), _grads(plain)


def own_log_probs(plain, one, inputs):
    """The log-probs of the labels of a row, by a model of transformers."""
    logits = plain(**inputs, use_cache=False).logits[0]
    picked = logits.log_softmax(-1).gather(-1, one.labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(one.labels == IGNORE, 0.0, picked)


def _grads(model):
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.clone() for name, grad in grads.items() if bool(grad.any())}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    counts = {}
    for name in sys.argv[1:] or types():
        start = time.time()
        trial = try_type(name)
        counts[trial.outcome] = counts.get(trial.outcome, 0) + 1
        print(
            f"{trial.name:28s} {trial.outcome:13s} {time.time() - start:4.1f} {trial.kinds} {trial.reason[:400]!r}",
            flush=True,
        )
    print(counts)
