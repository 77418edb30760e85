"""From files to log-probs, for each family: packs equal its own processor and transformers on each row."""

import copy
import json

import numpy as np
import pytest
import soundfile
import torch
from families import KIT, TOKENS, VISION, is_supported
from PIL import Image
from processors import chat_processor
from test_media import processor_outputs
from tiny_models import check_packed_is_alone, close
from transformers import AutoConfig

from mvp_engine.data.batch import IGNORE
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data.read.decoders import MediaInfo

RATE = 16000


def model_of(name, processor):
    """The tiny model of the other tests, with the image sizes and token ids of the tiny processors."""
    special = copy.deepcopy(VISION[name][1])
    special["text_config"] |= {"vocab_size": 400, "max_position_embeddings": 4096}
    vision = special.get("vision_config", {})
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", 4)
    for key, value in {"image_size": 16, "patch_size": patch, "window_size": 4 * patch}.items():
        if key in vision:
            vision[key] = [value, value] if isinstance(vision[key], list) else value
    if "audio_config" in special:
        special["audio_config"]["max_source_positions"] = 100
    if "image_grid_pinpoints" in special:
        special["image_grid_pinpoints"] = processor.image_processor.image_grid_pinpoints
    vocab = processor.tokenizer.get_vocab()
    named = {
        f"{kind}_token_id": [
            getattr(one, f"{kind}_token", "") for one in (processor.tokenizer, processor)
        ]
        for kind in ("image", "video", "audio")
    }
    named |= {
        "vision_start_token_id": ["<|vision_start|>", "<|vision_bos|>"],
        "audio_start_token_id": ["<|audio_bos|>"],
    }
    ids = {
        key: vocab[token]
        for key, tokens in named.items()
        for token in reversed(tokens)
        if token in vocab
    }
    torch.manual_seed(0)
    model = LanguageModel.from_config(AutoConfig.for_model(name, **{**TOKENS, **special, **ids}))
    with torch.no_grad():
        for p in model.parameters():
            # So that every input changes the output by far more than 1e-5.
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def file_of(folder, kind, i, rate=RATE):
    """Write an image, the frames of a video, or an audio file, in several sizes; returns the name or names."""
    rng = np.random.default_rng(i)
    if kind == "audio":
        soundfile.write(
            folder / f"{i}.wav",
            rng.uniform(-1, 1, 4000 + 3000 * i).astype(np.float32),
            rate,
            "FLOAT",
        )
        return f"{i}.wav"
    names = [f"{kind}{i}_{frame}.png" for frame in range(1 if kind == "image" else 4)]
    for name in names:
        Image.fromarray(rng.integers(0, 255, (24 + 16 * i, 40, 3), dtype=np.uint8)).save(
            folder / name
        )
    return names[0] if kind == "image" else names


def opened(folder, kind, file):
    """The item as the processor takes it, read without the kit."""
    if kind == "audio":
        wave, rate = soundfile.read(folder / file, dtype="float32")
        return MediaInfo("audio", num_samples=len(wave), sampling_rate=rate), wave
    if kind == "image":
        return MediaInfo("image"), Image.open(folder / file)
    frames = torch.stack(
        [torch.from_numpy(np.array(Image.open(folder / name))).permute(2, 0, 1) for name in file]
    )
    return MediaInfo("video", total_frames=len(file), fps=2.0, num_frames=len(file)), frames


def own_log_probs(model, given):
    """The log-probs of transformers' own model for the outputs of its processor."""
    with attention.eager_attention(model.hf.config), torch.no_grad():
        logits = model.hf(**given, use_cache=False).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(-1, given["input_ids"][0, 1:, None])[:, 0]
    return torch.cat([picked, picked.new_zeros(1)])


@pytest.mark.slow
@pytest.mark.parametrize("name", filter(is_supported, KIT))
def test_data_kit_packs_equal_processor_and_transformers_on_each_row(name, tmp_path):
    processor = chat_processor(name.removesuffix("_thinker"))
    model, kinds = model_of(name, processor), KIT[name].split(", ")
    questions = [
        [],
        *([(kind, i)] for i, kind in enumerate(kinds)),
        [(kinds[0], 0), (kinds[0], 1)],
    ]
    if len(kinds) > 1 and name != "smolvlm":  # its processor takes one kind at a time
        questions.append([(kind, i) for i, kind in enumerate([*kinds, "image"])])
    rows = []
    for i, media in enumerate(questions):
        blocks = [{"type": kind, kind: file_of(tmp_path, kind, n), "fps": 2.0} for kind, n in media]
        content = [*blocks, {"type": "text", "text": f"What is {i}?"}] if media else "Hello."
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": f"It is {i}."},
                ]
            }
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"sources": [{"path": str(tmp_path / "rows.jsonl")}], "pack_tokens": 16384}
    settings |= {
        "global_batch_tokens": 16384,
        "cache": str(tmp_path / "cache"),
        "max_bad_rows": 0.0,
    }
    kit = MLLMDataKit(MLLMData.model_validate(settings), processor, model_config=model.hf.config)
    assert kit.row_encoder.media.kinds == kinds
    (pack,) = kit.loader("train")
    order = pack.sequence_fields["sample"].tolist()
    assert sorted(order) == list(range(len(rows)))
    ones = [pack.select([order.index(i)]) for i in range(len(rows))]
    for one, row, media in zip(ones, rows, questions, strict=True):
        check_row(
            model,
            processor,
            one,
            row,
            [opened(tmp_path, b["type"], b[b["type"]]) for b in media_of(row, media)],
        )
    check_packed_is_alone(model, ones, ["log_probs"])
    assert close(
        model(pack, ["log_probs"])["log_probs"], torch.cat([alone(model, ones[i]) for i in order])
    )
    check_bf16_loses_nothing(model, kit, pack)


def check_bf16_loses_nothing(model, kit, pack):
    """In bf16, media in bf16 give bit-equal outputs."""
    kit.row_encoder.dtype = torch.bfloat16
    (light,) = kit.loader("train")
    assert all(media.values.dtype == torch.bfloat16 for media in light.media.values())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        full, same = (model(batch, ["log_probs"])["log_probs"] for batch in (pack, light))
    assert full.equal(same)
    assert not full.equal(model(pack, ["log_probs"])["log_probs"])


def media_of(row, media):
    return row["messages"][0]["content"][: len(media)] if media else []


def alone(model, one):
    return model(one, ["log_probs"])["log_probs"]


def check_row(model, processor, one, row, media):
    """Tokens, loss mask and log-probs equal those of the family's processor, chat template and model for the row."""
    shown = [{**message, "content": _typed(message["content"])} for message in row["messages"]]
    # SmolVLM's has two.
    text = processor.apply_chat_template(shown, processor.chat_template, tokenize=False)
    given = processor_outputs(
        processor, text, [info for info, _ in media], [item for _, item in media]
    )
    assert one.input_ids.tolist() == given["input_ids"][0].tolist()
    answer, places = row["messages"][1]["content"], (one.labels != IGNORE).nonzero()[:, 0]
    assert torch.equal(one.labels[places], one.input_ids[places + 1])
    stop = text[text.rindex(answer) + len(answer) :].strip()
    trained = processor.tokenizer.decode(one.labels[places])
    # With a leading space where the prompt does not end in one.
    assert trained.lstrip() == answer + stop
    assert places[-1] - places[0] + 1 == len(places)
    assert close(alone(model, one)[places], own_log_probs(model, given)[places])


def _typed(content):
    """Content blocks without the values of media, as templates expect them."""
    if isinstance(content, str):
        return content
    return [block if block["type"] == "text" else {"type": block["type"]} for block in content]
