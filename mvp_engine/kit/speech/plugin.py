"""What speech adds to the core, by extension point (docs/plugins.md). It imports neither torch nor pydantic."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError, count
from mvp_engine.plugins import InspectFact, ModelFolder

if TYPE_CHECKING:
    from mvp_engine.kit.data import MLLMDataKit
    from mvp_engine.kit.decoding import Completion
    from mvp_engine.kit.speech.generate import Player, Sound
    from mvp_engine.kit.speech.row_part import MadeCodes
    from mvp_engine.kit.speech.settings import SpeechGeneration

LOGGER = logging.getLogger("mvp_engine")
KIT = "mvp_engine.kit.speech"

PLUGINS = {
    "model_engine": {"omni_model.fsdp": f"{KIT}.omni_model:OmniModelEngine"},
    "config": {"omni_model": f"{KIT}.settings:SpeechConfig"},
    "model_folder": {"omni_model": f"{KIT}.plugin:OmniModelFolder"},
    "model_part": {"talker": f"{KIT}.omni_model:OmniModel"},
    "target": {"audio": f"{KIT}.row_part:take_speech"},
    "inspect": {
        "spoken": f"{KIT}.plugin:SPOKEN",
        "talker": f"{KIT}.plugin:TALKER",
    },
    "data_command": {"codes": f"{KIT}.plugin:CodesCommand"},
    "chat_option": {"speak": f"{KIT}.plugin:SpeechOutput"},
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


class CodesCommand:
    """`mvp data codes`: the codes of all sounds that a config's model learns to speak, made before the training."""

    usage = """
mvp data codes -> tools.inspect:run_data_command
make the codes of all sounds that a config's model learns to speak, on a GPU if there is one
  file=CONFIG             a recipe's YAML file with data.speech
  @overrides
  @json
examples:
  mvp data codes my/configs/speech.yaml                # once, before a training; what is on disk is not made again
  mvp data codes my/configs/speech.yaml data.speech.codec=kyutai/mimi
"""

    @staticmethod
    def run(kit: MLLMDataKit, file: str, *, as_json: bool) -> None:
        """Make the codes of every split, with progress on stderr, and print what was made by source."""
        with _progress_shown():
            _print_codes(kit, file, as_json)


def _print_codes(kit: MLLMDataKit, file: str, as_json: bool) -> None:
    from mvp_engine.kit.speech.row_part import make_codes

    speech: Any = kit.row_encoder.row_part
    if speech is None or speech.store is None:
        key = "data.speech" if speech is None else "data.speech.codec"
        raise UserError(f"{file}: {key} is not set, so no sound of its rows becomes codes")
    by_source: dict[str, MadeCodes] = {}
    for split in kit.splits:
        if kit.is_stream(split):
            print(f"{split}: the rows of a stream are encoded while it is read", file=sys.stderr)
            continue
        for name, settings in zip(kit.source_names(split), kit.sources(split), strict=True):
            row_format = settings.row_format(kit.settings)
            made = make_codes(name, kit.open_rows(settings), row_format, speech, again=True)
            if made is not None:
                by_source[f"{split}/{name}"] = made
    if as_json:
        sources = {name: {**asdict(made), "speed": made.speed} for name, made in by_source.items()}
        print(json.dumps({"folder": str(speech.store.folder), "sources": sources}, indent=2))
        return
    for name, made in by_source.items():
        print(f"{name}: {made}")
    print(f"codes: {speech.store.folder}")


@contextmanager
def _progress_shown() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


def lines_of_spoken(spoken: list[dict[str, Any]], in_full: bool) -> Iterator[tuple[str, str, str]]:
    """The spoken answers of a sequence, for `mvp data inspect`."""
    for turn in spoken:
        words = count(turn["frames"], "frame")
        if turn["seconds"] is not None:
            words += f", {turn['seconds']:.1f} s"
        if turn["speaker"]:
            words += f", speaker {turn['speaker']}"
        yield f"answer {turn['answer']} is spoken", words, ""


def lines_of_talker(positions: int, in_full: bool) -> Iterator[tuple[str, str, str]]:
    if positions:
        yield "talker positions", f"{positions:,}", ""


SPOKEN = InspectFact(lines_of_spoken, default=[])
TALKER = InspectFact(lines_of_talker, default=0)


@dataclass
class SpeechOutput:
    """`mvp chat --speak FILE.wav`: one WAV file for each answer."""

    file: Path
    speaker: str | None
    codec: str | None
    settings: SpeechGeneration
    player: Player | None = None
    written: int = 0
    model_type = "omni_model"
    usage = """
  --speak FILE            speak the answers of an Omni model into this WAV file; later answers get a number
  --speaker NAME          the voice (default: the model's first)
  --codec CODEC           play codes with this codec, a folder or file.py:Class (default: the model's vocoder)
  --speech-temperature T  of the spoken codes; 0: greedy (default: 0.9)
  --max-frames N          most frames of a sound, 12.5 a second for Qwen3-Omni (default: 1024)
"""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SpeechOutput | None:
        """What the options of `mvp chat` ask for; None without `--speak`."""
        if options["speak"] is None:
            for option in ("speaker", "codec", "speech_temperature", "max_frames"):
                if options[option] is not None:
                    name = option.replace("_", "-")
                    raise UserError(f"--{name} is for spoken answers: add --speak FILE.wav")
            return None
        from mvp_engine.kit.speech.settings import SpeechGeneration

        file = Path(options["speak"]).expanduser()
        if file.suffix.lower() != ".wav":
            raise UserError(
                f"--speak {file}: sounds are written as WAV files: give a name that ends with .wav"
            )
        given = {"temperature": options["speech_temperature"], "max_frames": options["max_frames"]}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("temperature", 0) < 0:
            raise UserError(
                f"--speech-temperature {given['temperature']:g}: give 0 (greedy) or more"
            )
        if given.get("max_frames", 1) < 1:
            raise UserError(f"--max-frames {given['max_frames']}: give 1 or more")
        settings = SpeechGeneration.model_validate(given)
        return cls(file, options["speaker"], options["codec"], settings)

    def open(self, folder: Path) -> None:
        """Open the codec, or else the vocoder of the model's folder, and check it and the speaker."""
        from mvp_engine.hf.model.config_source import read_config
        from mvp_engine.kit.speech.codec import open_codec
        from mvp_engine.kit.speech.generate import Player
        from mvp_engine.kit.speech.protocol import SpeechProtocol

        if self.codec is None:
            self.player = Player.of_folder(folder)
        else:
            self.player = Player.of_codec(open_codec(self.codec, key="--codec"))
        protocol = SpeechProtocol.for_config(read_config(folder, {}))
        assert protocol is not None, "a model that speaks"
        self.player.check(protocol)
        if self.speaker is not None and self.speaker.lower() not in protocol.speakers:
            known = ", ".join(protocol.speakers)
            raise UserError(f"--speaker {self.speaker}: the model's speakers are {known}")

    def write(self, model: Any, messages: Sequence[Any], completion: Completion) -> dict[str, Any]:
        """Speak an answer to `messages`; returns the facts of the file, for the JSON of the answer."""
        sound = self._sound(model, messages, completion)
        self.written += 1
        file = self.file
        if self.written > 1:
            file = file.with_stem(f"{file.stem}_{self.written}")
        sound.save(file)
        facts = {
            "file": str(file),
            "frames": len(sound.codes),
            "seconds": round(sound.seconds, 3),
            "ended": sound.ended,
            "speaker": self.speaker,
        }
        return {"speech": facts}

    def _sound(self, model: Any, messages: Sequence[Any], completion: Completion) -> Sound:
        from mvp_engine.kit.decoding import with_completion
        from mvp_engine.kit.speech.generate import speak

        assert self.player is not None
        tokens = [token for token in completion.tokens if token not in model.stop]
        if not tokens:
            raise UserError("the answer has no text, so there is nothing to speak")
        prompt = with_completion(model.prompt(messages), None, tokens)
        (sound,) = speak(model.engine.model, [prompt], self.player, [self.speaker], self.settings)
        return sound

    def words(self, written: dict[str, Any]) -> str:
        """What `write` returned, as a line for people."""
        facts = written["speech"]
        end = "" if facts["ended"] else ", cut off at --max-frames"
        return f"{facts['file']}: {facts['seconds']:.1f} s{end}"
