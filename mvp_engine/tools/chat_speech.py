"""The sounds of `mvp chat --speak`: one WAV file for each answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError
from mvp_engine.kit.settings import SpeechGeneration

if TYPE_CHECKING:  # they import torch
    from mvp_engine.kit.chat import ChatModel
    from mvp_engine.kit.decoding import Completion
    from mvp_engine.kit.player import Player


@dataclass
class SpeechOutput:
    """Where sounds go, and what plays their codes."""

    file: Path
    speaker: str | None
    codec: str | None
    settings: SpeechGeneration
    player: Player | None = None
    written: int = 0

    def open_player(self, folder: Path) -> None:
        """Open the codec, or else the vocoder of the model's folder, and check it and the speaker."""
        from mvp_engine.hf.config_source import read_config
        from mvp_engine.hf.speech_protocol import SpeechProtocol
        from mvp_engine.kit.player import Player
        from mvp_engine.kit.speech.codec import open_codec

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

    def write(
        self, model: ChatModel, messages: Sequence[Any], completion: Completion
    ) -> dict[str, Any]:
        """Speak an answer to `messages`; returns the facts of the file."""
        assert self.player is not None
        sound = model.speak(messages, completion, self.player, self.speaker, self.settings)
        self.written += 1
        file = self.file
        if self.written > 1:
            file = file.with_stem(f"{file.stem}_{self.written}")
        sound.save(file)
        return {
            "file": str(file),
            "frames": len(sound.codes),
            "seconds": round(sound.seconds, 3),
            "ended": sound.ended,
            "speaker": self.speaker,
        }


def speech_output(args: argparse.Namespace) -> SpeechOutput | None:
    """What the options of `mvp chat` ask for; None without `--speak`."""
    if args.speak is None:
        for option in ("speaker", "codec", "speech_temperature", "max_frames"):
            if getattr(args, option) is not None:
                name = option.replace("_", "-")
                raise UserError(f"--{name} is for spoken answers: add --speak FILE.wav")
        return None
    file = Path(args.speak).expanduser()
    if file.suffix.lower() != ".wav":
        raise UserError(
            f"--speak {args.speak}: sounds are written as WAV files: give a name that ends with .wav"
        )
    given = {"temperature": args.speech_temperature, "max_frames": args.max_frames}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("temperature", 0) < 0:
        raise UserError(f"--speech-temperature {given['temperature']:g}: give 0 (greedy) or more")
    if given.get("max_frames", 1) < 1:
        raise UserError(f"--max-frames {given['max_frames']}: give 1 or more")
    return SpeechOutput(file, args.speaker, args.codec, SpeechGeneration.model_validate(given))
