"""What speech adds to the core, by extension point (docs/plugins.md). It imports neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from mvp_engine.plugins import ModelFolder

KIT = "mvp_engine.kit.speech"

PLUGINS = {
    "model_engine": {"omni_model.fsdp": f"{KIT}.omni_model:OmniModelEngine"},
    "config": {"omni_model": f"{KIT}.settings:SpeechConfig"},
    "model_folder": {"omni_model": f"{KIT}.plugin:OmniModelFolder"},
    "target": {"audio": f"{KIT}.row_part:take_speech"},
    "inspect": {
        "spoken": f"{KIT}.commands:lines_of_spoken",
        "talker": f"{KIT}.commands:lines_of_talker",
    },
    "data_command": {"codes": f"{KIT}.commands:CodesCommand"},
    "chat_option": {"speak": f"{KIT}.commands:SpeechOutput"},
}

# What the code of Qwen3-Omni reads and its config classes do not declare, so that no model can be built from their
# defaults: by path of the sub-config, with the values of the folder of Qwen3-Omni-30B-A3B.
_UNDECLARED = (
    ("thinker_config", "vision_start_token_id", 151652),
    ("talker_config", "spatial_merge_size", 2),
    ("talker_config.text_config", "shared_expert_intermediate_size", 768),
)


class OmniModelFolder(ModelFolder):
    """Folders of Qwen3-Omni and CSM."""

    without_text: Mapping[str, str] = {
        "csm": "speaks the text that it is given: mvp_engine.kit.speech.speak"
    }

    @classmethod
    def is_of(cls, config: Any) -> bool:
        return getattr(config, "model_type", None) == "csm"

    @classmethod
    def complete_config(cls, config: Any) -> None:
        if getattr(config, "model_type", "") != "qwen3_omni_moe":
            return
        for path, name, value in _UNDECLARED:
            part = attrgetter(path)(config)
            if not hasattr(part, name):
                setattr(part, name, value)
