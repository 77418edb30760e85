"""Processors of Hugging Face folders: loading one, and the files that are saved with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.files import is_inside, leads_out
from mvp_engine.hf.model.config_source import warn_of_custom_code
from mvp_engine.hf.weights.hub import local_folder

GENERATION_CONFIG = "generation_config.json"


def load_processor(folder: str | Path | None) -> Any:
    """The processor of a model's folder or of the Hub, or its tokenizer where it has no processor."""
    if folder is None:
        raise UserError(
            "no processor: set model.path to a model's folder or to a model of the Hub, or processor to one "
            "that has it"
        )
    path = local_folder(folder)
    if not path.is_dir():
        raise UserError(
            f"{folder} is not a folder with a model's processor or tokenizer, nor a model of the Hub"
        )
    import transformers

    _refuse_files_outside(path)
    try:
        # The tokenizer config of a text model may name the processor class of the VLM it was taken from. AutoProcessor
        # takes a second to import, in which the rows of a text model can be measured already.
        auto_class = (
            transformers.AutoTokenizer if _is_text_only(path) else transformers.AutoProcessor
        )
        # Code in a model's folder is not run, nor is the user asked on the terminal whether it may.
        found = auto_class.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise UserError(
            f"{folder} has no processor or tokenizer that transformers can read: {reason}. Set processor to a folder, "
            "or to a model of the Hub, that has it"
        ) from None
    for name in ("tokenizer_config.json", "*processor_config.json"):
        for file in sorted(path.glob(name)):
            warn_of_custom_code(file)
    if type(found).__name__ == "CsmProcessor":  # it puts sounds into the text
        raise UserError(
            f"{folder} has a CsmProcessor, which is not supported: set processor to a folder with its tokenizer and a "
            "chat template of turns (docs/omni.md, CSM, shows how to write one)"
        )
    return found


def _refuse_files_outside(folder: Path) -> None:
    """Raise for a processor whose settings or links name files outside of its folder: transformers would read them."""
    for file in folder.glob("*"):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and leads_out(file, folder):
            raise UserError(
                f"{file} is a link to {file.resolve()}, which is not read: replace it by the file itself, or do not "
                "trust this model"
            )
    config = folder / "tokenizer_config.json"
    try:
        settings = json.loads(config.read_text()) if config.is_file() else {}
    except ValueError:
        return  # transformers says what is wrong
    for key, value in settings.items():
        if key.endswith("_file") and isinstance(value, str) and not is_inside(value):
            raise UserError(
                f"{config}: {key}={value!r} is outside of its folder, which is not read: remove the key, or do not "
                "trust this model"
            )


def _is_text_only(folder: Path) -> bool:
    """Whether a folder has neither files of a processor nor a model with encoders.

    An Omni model may have been trained with a tokenizer alone: to speak.
    """
    if any(folder.glob("*processor_config.json")):
        return False
    config = folder / "config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}
    return (folder / "tokenizer_config.json").is_file() and not any(
        name in settings for name in ("vision_config", "audio_config")
    )


def save_generation_config(
    folder: Path, model: str | None, pad_token_id: int | None, eos_token_ids: Sequence[int]
) -> None:
    """Write `generation_config.json`: that of the model's own folder, with these tokens as end of sequence too.

    No other file of the folder says where the answers of a fine-tuned model end.
    """
    config: dict[str, Any] = {"pad_token_id": pad_token_id}
    if model is not None:
        original = local_folder(model) / GENERATION_CONFIG
        if original.is_file():
            config = json.loads(original.read_text())
    known = config.get("eos_token_id")
    if known is None:
        known = []
    eos = known if isinstance(known, list) else [known]
    eos += [token for token in eos_token_ids if token not in eos]
    config["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    (folder / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
