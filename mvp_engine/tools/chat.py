"""`mvp chat`: talk to a run, a Hugging Face folder or a LoRA adapter, with images, video and audio."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine import plugins
from mvp_engine.checkpoint.format import META
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError, similar_path
from mvp_engine.hf.lora.lora_import import read_adapter
from mvp_engine.hf.model.adapter import cast_frozen_weights
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG, base_of_adapter, local_folder
from mvp_engine.hf.weights.merge import merge
from mvp_engine.kit.data.encode.processor import GENERATION_CONFIG, load_processor
from mvp_engine.kit.data.encode.row_encoder import RopePositions, RowEncoder
from mvp_engine.kit.decoding import Completion, Decoding, TextStream, complete, stop_at
from mvp_engine.kit.generation import encode_prompt
from mvp_engine.model_engine import ModelSource, Settings, engine_class, precision_on
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.runs import best_checkpoint, checkpoint_step, trained_run
from mvp_engine.tools.merge import build_model, model_checkpoint

HELP = "/image FILE, /video FILE, /audio FILE: with your next message   /reset: a new conversation   /exit"
KINDS = ("image", "video", "audio")


@dataclass
class Chat:
    """One conversation: the messages so far, and the media to send with the next one."""

    model: ChatModel
    decoding: Decoding
    as_json: bool = False
    # A `chat_option` plug-in, which also writes answers in another form, such as speech.
    output: Any = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        self.media = []
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def read_lines(self) -> None:
        """Answer each line of the standard input. On a terminal, print a prompt for each.

        On a terminal an error is printed and the chat continues; otherwise it is raised.
        """
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
            if line.partition(" ")[0] == "/exit":
                break
            try:
                self._handle_line(line)
            except UserError as error:
                if not is_terminal:
                    raise
                print(error, file=sys.stderr)
            except KeyboardInterrupt:  # Ctrl-C ends the answer; at the prompt it ends the chat
                if not is_terminal:
                    raise
                print(" ...")

    def _handle_line(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self.reset()
        elif command in [f"/{kind}" for kind in KINDS]:
            self.media.append(medium(command[1:], rest.strip()))
        elif command.startswith("/"):
            print(HELP)
        elif line:
            self.ask(line)

    def ask(self, text: str) -> None:
        """Answer one message and print the answer: as it is generated, or as one JSON object at the end."""
        start = time.perf_counter()
        parts = [*self.media, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if self.media else text})
        self.media = []
        printed: list[str] = []

        def show(text: str) -> None:
            printed.append(text)
            print(text, end="", flush=True)

        try:
            on_text = None if self.as_json else show
            completion = self.model.answer(self.messages, self.decoding, on_text)
        except UserError:
            self.messages.pop()  # the question that could not be read
            raise
        except KeyboardInterrupt:
            self._add_answer("".join(printed))
            raise
        answer = self.model.text(completion.tokens)
        question = list(self.messages)
        output_fields = (
            {} if self.output is None else self.output.write(self.model, question, completion)
        )
        self._add_answer(answer)
        if self.as_json:
            record = {
                "messages": question,
                "answer": answer,
                "tokens": len(completion.tokens),
                "stopped": completion.is_finished,
                "log_prob": sum(completion.log_probs),
                "seconds": round(time.perf_counter() - start, 3),
            }
            print(json.dumps(record | output_fields, ensure_ascii=False))
            return
        print()
        if self.output is not None:
            print(f"[{self.output.words(output_fields)}]", file=sys.stderr)

    def _add_answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def medium(kind: str, file: str) -> dict[str, Any]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"no {kind} file {file}.{similar_path(path)}")
    return {"type": kind, kind: str(path.resolve())}


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
    """Answer one `prompt`, or each line of the standard input in one conversation; returns the exit code."""
    parts = [medium(kind, file) for kind, file in media]  # first: it raises for missing files
    with model_folders(target, Path(root)) as (folder, adapter):
        model_type = "language_model" if output is None else output.model_type
        model = ChatModel(folder, adapter, device, stop_strings, model_type)
        if output is not None:
            output.open(folder)
        conversation = Chat(model, decoding, as_json, output, system)
        conversation.reset()
        conversation.media = parts
        try:
            conversation.read_lines() if prompt is None else conversation.ask(prompt)
        except KeyboardInterrupt:
            print()
            return 128 + signal.SIGINT
    return 0


@contextmanager
def model_folders(target: str, root: Path) -> Iterator[tuple[Path, Path | None]]:
    """A context that gives (folder of the model, folder of the adapter or None) for a target.

    Of a run, the checkpoint that counts as its model is used: its export if there is one, else the checkpoint is merged
    into a temporary folder.
    """
    path = local_folder(target, weights=True)
    if (base := base_of_adapter(path, weights=True)) is not None:
        yield base, path
    elif (path / "config.json").is_file():
        yield path, None
    else:
        run = path if path.is_dir() else trained_run(target, root).dir
        exports = [path.parent for path in run.glob("hf_step_*/config.json")]
        best = best_checkpoint(run / "checkpoints")
        if best is not None:
            step = checkpoint_step(best) or 0
            exports = [path for path in exports if _step_of_export(path) == step]
        if exports:
            newest = max(exports, key=_step_of_export)
            print(f"model: {newest}", file=sys.stderr)
            yield newest, None
            return
        if best is None and not (run / META).is_file():
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


def _step_of_export(folder: Path) -> int:
    """The step in the name of an export, such as `hf_step_100` or `hf_step_100_ema`."""
    digits = folder.name.removeprefix("hf_step_").partition("_")[0]
    return int(digits) if digits.isdecimal() else 0


def output_of(options: Mapping[str, Any]) -> Any:
    """Returns the `chat_option` plug-in that the options of `mvp chat` enable, or None."""
    outputs = [plugin.of(options) for plugin in plugins.load_all("chat_option").values()]
    return next((output for output in outputs if output is not None), None)


# ChatModel answers conversations with text, images, video and audio by the model of a Hugging Face folder.
#
# The data kit renders prompts and processes media, as in a training with the same processor.

Message = Mapping[str, Any]
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"


class ChatModel:
    """A model and its processor. `adapter` is a folder of a LoRA adapter in peft's format for this model.

    An answer ends before the first of `stop_strings`. `model_type` is a registered model type that generates text.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Path | None = None,
        device: str | None = None,
        stop_strings: Sequence[str] = (),
        model_type: str = "language_model",
    ) -> None:
        torch_device = _find_device(device)
        config = read_config(folder, {})
        without_text = plugins.without_text()
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
            max_tokens=2**40,  # no limit
            positions=RopePositions.for_config(config),
        )
        engine_type = engine_class(model_type)
        model: Any = engine_type.build_model(ModelSource(str(folder)))
        settings = Settings(precision=precision_on(torch_device, "auto"))
        if settings.precision != "fp32":
            cast_frozen_weights(model.requires_grad_(False), DTYPES[settings.precision])
        self.engine = engine_type(model, Layout(World(0, 1, 0, 1, torch_device)), settings)
        self.engine.initialize()
        if adapter is not None:
            merge_adapter(self.engine.model, adapter)
        self.tokenizer = self.encoder.media.tokenizer
        self.stop = self._stop_tokens(folder)
        self.stop_strings = list(filter(None, stop_strings))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> PackedBatch:
        """Returns a conversation as a batch of one sequence, which the answer continues.

        The content of a message is text, or a list of parts such as {"type": "text", "text": ...}.
        """
        return encode_prompt(self.encoder, messages, tools)

    def answer(
        self,
        messages: Sequence[Message],
        decoding: Decoding,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Generates the next message. `on_text` is called with each new piece of its text."""
        stream = TextStream(on_text, self.stop_strings) if on_text is not None else None
        ends_at_string = stop_at(self.tokenizer, self.stop_strings) if self.stop_strings else None

        def is_finished(tokens: list[int]) -> bool:
            if stream is not None:
                stream.show(self.text(tokens))
            return ends_at_string is not None and ends_at_string(tokens)

        decoding = replace(decoding, stop=self.stop, is_finished=is_finished)
        (completion,) = complete(self.engine, self.prompt(messages), decoding)
        if stream is not None:
            stream.end(self.text(completion.tokens))
        return completion

    def text(self, tokens: Sequence[int], stop_strings: Sequence[str] | None = None) -> str:
        """Decodes an answer, up to its first stop string."""
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        for stop_string in self.stop_strings if stop_strings is None else stop_strings:
            text = text.partition(stop_string)[0]
        return text

    def _stop_tokens(self, folder: Path) -> set[int]:
        """Returns the tokens that end an answer: those of the generation config, tokenizer and chat template."""
        tokens = {self.tokenizer.eos_token_id}
        file = folder / GENERATION_CONFIG
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            tokens |= set(eos if isinstance(eos, list) else [eos])
        if stop := self.encoder.template.stop_token:
            tokens.add(self.tokenizer.convert_tokens_to_ids(stop))
        return tokens - {None}  # each of them may lack one


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


def merge_adapter(model: Any, folder: Path) -> None:
    """Add a LoRA adapter in peft's format to the weights of a model, in place."""
    saved = read_adapter(folder)
    if saved.config.get("target_parameters"):
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: target_parameters (adapters of stacked experts) is not supported; merge the "
            "adapter with peft, and give the merged folder"
        )
    config, tensors = saved.config, saved.tensors
    scale = saved.alpha / config["r"]
    for name, tensor in tensors.items():
        layer, is_lora_a, _ = name.partition(".lora_A.")
        if is_lora_a:
            lora_b = tensors[name.replace(".lora_A.", ".lora_B.")]
            delta = scale * (lora_b.float() @ tensor.float())
            _weight(model, f"{layer}.weight", folder).add_(delta)
        elif name.endswith(_TOKEN_ROWS):  # of tokens that were added to the vocabulary
            embedding = name.removesuffix(_TOKEN_ROWS)
            ids = config["trainable_token_indices"][embedding]
            weight = _weight(model, f"{embedding}.weight", folder)
            if max(ids) >= len(weight):
                raise UserError(
                    f"{folder} trains the row of token {max(ids)}, and the model has {len(weight)}: merge the adapter "
                    "in its run (mvp export RUN OUT), or resize the embeddings of the model's folder"
                )
            weight[ids] = tensor.to(weight)
        elif ".lora_" not in name:  # trained in full
            _weight(model, name, folder).copy_(tensor)


def _weight(model: Any, name: str, folder: Path) -> Tensor:
    try:
        weight: Tensor = model.hf.get_parameter(name).data
    except AttributeError:
        raise UserError(f"{folder} adapts {name}, which the model does not have") from None
    return weight
