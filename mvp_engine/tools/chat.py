"""`mvp chat`: talk to a run, a Hugging Face folder or a LoRA adapter, with images, video and audio."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.checkpoint.format import META
from mvp_engine.errors import UserError, similar_path
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG, hub_model, local_folder
from mvp_engine.hf.weights.merge import merge
from mvp_engine.kit.chat import ChatModel
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.settings import SpeechGeneration
from mvp_engine.runs import best_checkpoint, checkpoint_step, trained_run
from mvp_engine.tools.merge import build_model, model_checkpoint

if TYPE_CHECKING:
    from mvp_engine.kit.chat import ChatModel
    from mvp_engine.kit.decoding import Completion
    from mvp_engine.kit.speech.player import Player

HELP = "/image FILE, /video FILE, /audio FILE: with your next message   /reset: a new conversation   /exit"
KINDS = ("image", "video", "audio")


@dataclass
class Conversation:
    """The messages so far, and the media that go with the next one."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        self.media = []
        self.messages = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def add_media(self, kind: str, file: str) -> None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise UserError(f"no {kind} file {file}.{similar_path(path)}")
        self.media.append({"type": kind, kind: str(path.resolve())})

    def ask(self, text: str) -> None:
        parts = [*self.media, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if self.media else text})
        self.media = []


def chat(
    target: str,
    *,
    root: str,
    media: list[tuple[str, str]],
    prompt: str | None,
    system: str | None,
    decoding: Decoding,
    stop_strings: list[str],
    device: str | None,
    as_json: bool,
    speech: SpeechOutput | None = None,
) -> int:
    """Answer one `prompt`, or each line of the standard input in one conversation; returns the exit code."""
    conversation = Conversation(system)
    conversation.reset()
    for kind, file in media:
        conversation.add_media(kind, file)
    with model_folders(target, Path(root)) as (folder, adapter):
        model = ChatModel(folder, adapter, device, stop_strings, speaks=speech is not None)
        if speech is not None:
            speech.open_player(folder)
        try:
            if prompt is not None:
                conversation.ask(prompt)
                _answer(model, conversation, decoding, as_json, speech)
            else:
                _loop(model, conversation, decoding, as_json, speech)
        except KeyboardInterrupt:
            print()
            return 128 + signal.SIGINT
    return 0


def _loop(
    model: ChatModel,
    conversation: Conversation,
    decoding: Decoding,
    as_json: bool,
    speech: SpeechOutput | None,
) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP)
    while True:
        try:
            line = input("\n> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            break
        command, _, rest = line.partition(" ")
        try:
            if command == "/exit":
                break
            if command == "/reset":
                conversation.reset()
            elif command.removeprefix("/") in KINDS and command.startswith("/"):
                conversation.add_media(command.removeprefix("/"), rest.strip())
            elif command.startswith("/"):
                print(HELP)
            elif line:
                conversation.ask(line)
                _answer(model, conversation, decoding, as_json, speech)
        except UserError as error:
            if not is_terminal:
                raise
            print(error, file=sys.stderr)
        except KeyboardInterrupt:  # ends the answer; at the prompt it ends the chat
            if not is_terminal:
                raise
            print(" ...")


def _answer(
    model: ChatModel,
    conversation: Conversation,
    decoding: Decoding,
    as_json: bool,
    speech: SpeechOutput | None,
) -> None:
    start = time.perf_counter()
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        print(text, end="", flush=True)

    try:
        completion = model.answer(conversation.messages, decoding, None if as_json else show)
    except UserError:
        conversation.messages.pop()  # the question that could not be read
        raise
    except KeyboardInterrupt:
        conversation.messages.append({"role": "assistant", "content": "".join(shown)})
        raise
    text = model.text(completion.tokens)
    spoken = None if speech is None else speech.write(model, conversation.messages, completion)
    conversation.messages.append({"role": "assistant", "content": text})
    if not as_json:
        print()
        if spoken is not None:
            end = "" if spoken["ended"] else ", cut off at --max-frames"
            print(f"[{spoken['file']}: {spoken['seconds']:.1f} s{end}]", file=sys.stderr)
        return
    record = {
        "messages": conversation.messages[:-1],
        "answer": text,
        "tokens": len(completion.tokens),
        "stopped": completion.is_finished,
        "log_prob": sum(completion.log_probs),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if spoken is not None:
        record["speech"] = spoken
    print(json.dumps(record, ensure_ascii=False))


@contextmanager
def model_folders(target: str, root: Path) -> Iterator[tuple[Path, Path | None]]:
    """The model's folder and an adapter's, if `target` is one. A run without an export is merged into a
    temporary folder."""
    path = local_folder(target, weights=True)
    if (path / ADAPTER_CONFIG).is_file():
        yield _base_of_adapter(path), path
    elif (path / "config.json").is_file():
        yield path, None
    else:
        run = path if path.is_dir() else trained_run(target, root).dir
        exports = [found for found in run.glob("hf_step_*") if (found / "config.json").is_file()]
        used = best_checkpoint(run / "checkpoints")
        if used is not None:
            step = checkpoint_step(used) or 0
            exports = [found for found in exports if _step_of_export(found) == step]
        if exports:
            newest = max(exports, key=_step_of_export)
            print(f"model: {newest}", file=sys.stderr)
            yield newest, None
            return
        if used is None and not (run / META).is_file():
            raise UserError(
                f"{run} has no checkpoint yet, and is neither a Hugging Face folder (config.json) nor a LoRA "
                f"adapter ({ADAPTER_CONFIG})"
            )
        with tempfile.TemporaryDirectory(prefix="mvp_chat_") as temporary:
            checkpoint = model_checkpoint(run)
            print(f"model: {checkpoint}", file=sys.stderr)
            folder = Path(temporary) / "model"
            merge(checkpoint, build_model(checkpoint), folder)
            yield folder, None


def _base_of_adapter(folder: Path) -> Path:
    """The folder of the model that an adapter was trained on; its config may name a model of the Hub."""
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    base = config.get("base_model_name_or_path")
    if base and hub_model(base) and config.get("revision"):
        base = f"{base}@{config['revision']}"
    found = local_folder(base, weights=True) if base else None
    if found is None or not (found / "config.json").is_file():
        raise UserError(
            f"{file}: base_model_name_or_path={base} is not a model's folder, nor a model of the Hub; "
            "write its path there"
        )
    return found


def _step_of_export(folder: Path) -> int:
    digits = folder.name.removeprefix("hf_step_").partition("_")[0]
    return int(digits) if digits.isdecimal() else 0


# The sounds of `mvp chat --speak`: one WAV file for each answer.


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
        from mvp_engine.hf.model.config_source import read_config
        from mvp_engine.kit.speech.codec import open_codec
        from mvp_engine.kit.speech.player import Player
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
