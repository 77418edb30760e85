"""ChatModel: a Hugging Face folder that answers conversations with text, images, video and audio.

Prompts are rendered, and media are processed, by the data kit: as in a training with the same processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mvp_engine import plugins
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf.model.adapter import cast_frozen_weights
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG
from mvp_engine.kit.data.encode.rope_positions import RopePositions
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.processor import GENERATION_CONFIG, load_processor
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.decoding import Completion, Decoding, complete, stop_at
from mvp_engine.model_engine import ModelSource, Settings, engine_class, precision_on
from mvp_engine.model_engine.base import DTYPES

Message = Mapping[str, Any]
_ADAPTER_PREFIX = "base_model.model."
# Options of peft that change what an adapter computes, with the value that is supported.
_PLAIN_ADAPTER = {
    "peft_type": "LORA",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "fan_in_fan_out": False,
}
# Models that do not answer, and what they do.
_WITHOUT_TEXT = {
    "pi0": "predicts actions: act.py of an export (docs/actions.md)",
}


class ChatModel:
    """A model and its processor. `adapter` is a folder of a LoRA adapter in peft's format for this model.

    An answer ends before the first of `stop_strings`. `model_type` is one that writes text.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Path | None = None,
        device: str | None = None,
        stop_strings: Sequence[str] = (),
        model_type: str = "language_model",
    ) -> None:
        place = _find_device(device)
        config = read_config(folder, {})
        without_text = _WITHOUT_TEXT | plugins.without_text()
        if config.model_type in without_text:
            raise UserError(
                f"{folder}: {config.model_type} writes no text, so mvp chat has no answer. It "
                f"{without_text[config.model_type]}"
            )
        model_class = (config.architectures or [""])[0]
        if model_class.endswith("ForSequenceClassification"):
            raise UserError(
                f"{folder}: {model_class} writes no text, so mvp chat has no answer. It scores text: RL uses it by "
                f"reward.model={folder}"
            )
        self.encoder = RowEncoder(
            load_processor(_folder_with_processor(folder, adapter)),
            max_tokens=2**40,
            positions=RopePositions.for_config(config),
        )
        engine_type = engine_class(model_type)
        model: Any = engine_type.build_model(ModelSource(str(folder)))
        settings = Settings(precision=precision_on(place, "auto"))
        if settings.precision != "fp32":
            cast_frozen_weights(model.requires_grad_(False), DTYPES[settings.precision])
        self.engine = engine_type(model, Layout(World(0, 1, 0, 1, place)), settings)
        self.engine.initialize()
        if adapter is not None:
            merge_adapter(self.engine.model, adapter)
        self.tokenizer = self.encoder.media.tokenizer
        self.stop = self._stop_tokens(folder)
        self.stop_strings = [one for one in stop_strings if one]

    @property
    def is_chat_model(self) -> bool:
        """Whether it has a chat template; without one it continues plain text."""
        return bool(self.encoder.template.renderer.chat_template)

    def prompt(self, messages: Sequence[Message]) -> PackedBatch:
        """A conversation up to the answer that follows. Contents are text, or a list of typed parts."""
        if self.is_chat_model:
            raw: dict[str, Any] = {"messages": list(messages)}
            format = RowFormat(prompt_only=True)
        else:
            raw = {"text": "".join(_plain_text(message) for message in messages)}
            format = RowFormat("text")
        try:
            sides = self.encoder.encode(raw, format, Path.cwd(), fit=False)
            (batch,) = self.encoder.load(sides, Path.cwd(), {})
        except BadRow as bad:
            raise UserError(f"{bad.reason}: {bad.detail}") from None
        return replace(batch, sequence_fields={})

    def answer(
        self,
        messages: Sequence[Message],
        decoding: Decoding,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """The next message; `on_text` gets each new piece of it while it is written."""
        stream = _TextStream(on_text, self.stop_strings) if on_text is not None else None
        at_string = stop_at(self.tokenizer, self.stop_strings) if self.stop_strings else None

        def is_finished(tokens: list[int]) -> bool:
            if stream is not None:
                stream.show(self.text(tokens))
            return at_string is not None and at_string(tokens)

        decoding = replace(decoding, stop=self.stop, is_finished=is_finished)
        (completion,) = complete(self.engine, self.prompt(messages), decoding)
        if stream is not None:
            stream.end(self.text(completion.tokens))
        return completion

    def text(self, tokens: Sequence[int]) -> str:
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        for one in self.stop_strings:
            text = text.partition(one)[0]
        return text

    def _stop_tokens(self, folder: Path) -> set[int]:
        """Where answers end: as the generation config, the tokenizer and the chat template say."""
        found: set[int] = set()
        file = folder / GENERATION_CONFIG
        if file.is_file():
            known = json.loads(file.read_text()).get("eos_token_id")
            found |= set(known if isinstance(known, list) else [known])
        found.add(self.tokenizer.eos_token_id)
        if stop := self.encoder.template.stop_token:
            found.add(self.tokenizer.convert_tokens_to_ids(stop))
        return found - {None}


class _TextStream:
    """Passes on what is new in a text that grows."""

    def __init__(self, on_text: Callable[[str], None], stop_strings: Sequence[str]) -> None:
        self.on_text = on_text
        self.length = 0  # of what was passed on
        starts = {one[:length] for one in stop_strings for length in range(1, len(one))}
        self.starts = sorted(starts, key=len, reverse=True)

    def show(self, text: str) -> None:
        # The first bytes of a character decode to a replacement mark until the others follow.
        text = text.rstrip("\ufffd")
        start = next((one for one in self.starts if text.endswith(one)), "")
        self.end(text.removesuffix(start))

    def end(self, text: str) -> None:
        if len(text) > self.length:
            self.on_text(text[self.length :])
            self.length = len(text)


def _find_device(name: str | None) -> torch.device:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UserError(f"no device {name!r}: write cpu, cuda, or cuda:1") from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UserError(f"device {name}: torch sees {count} GPUs here, counted from 0")
        torch.cuda.set_device(device)
    return device


def _folder_with_processor(folder: Path, adapter: Path | None) -> Path:
    has_tokenizer = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return adapter if adapter is not None and has_tokenizer else folder


def _plain_text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def merge_adapter(model: Any, folder: Path) -> None:
    """Add a LoRA adapter in peft's format to the weights of a model, in place."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    for option, plain in _PLAIN_ADAPTER.items():
        if config.get(option, plain) not in (plain, None, {}, []):
            raise UserError(
                f"{folder / ADAPTER_CONFIG}: {option}={config[option]} is not supported; "
                "merge the adapter with peft, and give the merged folder"
            )
    scale = config["lora_alpha"] / (config["r"] ** (0.5 if config.get("use_rslora") else 1.0))
    tensors = _adapter_tensors(folder)
    for name, lora_a in tensors.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            lora_b = tensors[name.replace(".lora_A.", ".lora_B.")]
            _weight(model, f"{layer}.weight", folder).add_(_delta(lora_b, lora_a, scale))
        elif ".lora_" not in name:  # trained in full
            _weight(model, name, folder).copy_(lora_a)


def _delta(lora_b: Tensor, lora_a: Tensor, scale: float) -> Tensor:
    return scale * (lora_b.float() @ lora_a.float())


def _adapter_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"{folder} has no adapter_model.safetensors")
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
        return {name.removeprefix(_ADAPTER_PREFIX): opened.get_tensor(name) for name in names}


def _weight(model: Any, name: str, folder: Path) -> Tensor:
    try:
        weight: Tensor = model.hf.get_parameter(name).data
    except AttributeError:
        raise UserError(f"{folder} adapts {name}, which the model does not have") from None
    return weight
