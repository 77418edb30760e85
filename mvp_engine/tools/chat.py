"""`mvp chat`: talk to a run, a Hugging Face folder or a LoRA adapter, with images, video and audio."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine import plugins
from mvp_engine.checkpoint.format import META
from mvp_engine.errors import UserError, similar_path
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG, hub_model, local_folder
from mvp_engine.hf.weights.merge import merge
from mvp_engine.kit.chat import ChatModel
from mvp_engine.kit.decoding import Decoding
from mvp_engine.runs import best_checkpoint, checkpoint_step, trained_run
from mvp_engine.tools.merge import build_model, model_checkpoint

if TYPE_CHECKING:
    from mvp_engine.kit.chat import ChatModel

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
    output: Any = None,
) -> int:
    """Answer one `prompt`, or each line of the standard input in one conversation; returns the exit code.

    `output` is a `chat_option` plug-in that its options ask for: it writes each answer in another form too.
    """
    conversation = Conversation(system)
    conversation.reset()
    for kind, file in media:
        conversation.add_media(kind, file)
    with model_folders(target, Path(root)) as (folder, adapter):
        model_type = "language_model" if output is None else output.model_type
        model = ChatModel(folder, adapter, device, stop_strings, model_type)
        if output is not None:
            output.open(folder)
        try:
            if prompt is not None:
                conversation.ask(prompt)
                _answer(model, conversation, decoding, as_json, output)
            else:
                _loop(model, conversation, decoding, as_json, output)
        except KeyboardInterrupt:
            print()
            return 128 + signal.SIGINT
    return 0


def output_of(args: argparse.Namespace) -> Any:
    """The `chat_option` plug-in that the options of `mvp chat` ask for; None without any."""
    outputs = [option.of(args) for option in plugins.load_all("chat_option").values()]
    return next((output for output in outputs if output is not None), None)


def _loop(
    model: ChatModel,
    conversation: Conversation,
    decoding: Decoding,
    as_json: bool,
    output: Any,
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
                _answer(model, conversation, decoding, as_json, output)
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
    output: Any,
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
    written = {} if output is None else output.write(model, conversation.messages, completion)
    conversation.messages.append({"role": "assistant", "content": text})
    if not as_json:
        print()
        if output is not None:
            print(f"[{output.words(written)}]", file=sys.stderr)
        return
    record = {
        "messages": conversation.messages[:-1],
        "answer": text,
        "tokens": len(completion.tokens),
        "stopped": completion.is_finished,
        "log_prob": sum(completion.log_probs),
        "seconds": round(time.perf_counter() - start, 3),
    }
    print(json.dumps(record | written, ensure_ascii=False))


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
