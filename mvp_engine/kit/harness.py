"""Evaluation harnesses: tasks of lm-eval (text) and lmms-eval (images, videos, audio) on the model of an engine.

A harness reads tasks, writes prompts and computes scores; its model class here asks our packed forward and decoding.
Every rank runs the harness with all requests and computes its share of them, so that a score is computed once from all
answers in their order. Packs are planned over all requests: they, and so the answers, do not depend on the ranks.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data.encode.row_encoder import EncodedSequence
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.decoding import Decoding, complete, stop_at
from mvp_engine.kit.examples import rewrite_page
from mvp_engine.kit.generation import check_writes, encode_prompt
from mvp_engine.kit.settings import HarnessTask
from mvp_engine.log.format import number

MAX_NEW_TOKENS = 256  # of a task that sets none, as in lm-eval
# Requests with media that are packed together: how many tokens they have is known when they are loaded.
MEDIA_REQUESTS = 16
# Settings of generation that do not change what is written here.
UNUSED = {"do_sample", "use_cache", "early_stopping", "image_aspect_ratio", "num_beams"}
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
PACKAGES = {"lm": "lm_eval", "lmms": "lmms_eval"}
# Its own pins exclude ours: antlr4 of 2018, PyAV 15.
INSTALL_LMMS = "pip install 'mvp-engine[lmms-eval]' && pip install --no-deps lmms-eval==0.7.3"
Tasks = Sequence[Any]  # of HarnessTask
# Keys of a task's file that only lmms-eval has.
LMMS_KEYS = ("doc_to_visual", "doc_to_messages", "lmms_eval_specific_kwargs")


class Requests:
    """Computes requests of a harness with the model of an engine, each rank its share."""

    def __init__(self, engine: Any, step: int) -> None:
        self.engine = engine
        self.step = step
        self.encoder = engine.data.row_encoder
        self.budget: int = engine.config.data.tokens_per_pack

    def text(self, ids: Sequence[int], scored: int = 0) -> PackedBatch:
        """Token ids as a batch of one sequence; of `scored` ones, the last, it predicts the log-probs."""
        inputs = list(ids[:-1] if scored else ids)
        side = EncodedSequence(inputs, [False] * len(inputs), [], [], [], [])
        (batch,) = self.encoder.load([side], Path.cwd(), {})
        labels = torch.full_like(batch.labels, IGNORE)
        if scored:
            labels[-scored:] = torch.tensor(ids[-scored:])
        return replace(batch, labels=labels, sequence_fields={})

    def answered(self, messages: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """A conversation whose assistant turns have loss, as in training."""
        try:
            sides = self.encoder.encode(
                {"messages": list(messages)}, RowFormat(), Path.cwd(), fit=False
            )
            (batch,) = self.encoder.load(sides, Path.cwd(), {})
        except BadRow as bad:
            raise UserError(f"{bad.reason}: {bad.detail}") from None
        return replace(batch, sequence_fields={})

    def log_likelihoods(
        self, costs: Sequence[int] | None, size: int, build: Callable[[int], PackedBatch]
    ) -> list[tuple[float, bool, int]]:
        """Of the labels of each request: the sum of log-probs, whether greedy decoding writes them, their number.

        `costs`: tokens of each request; None: they have media. `build(i)` is the batch of request i.
        """
        engine = self.engine
        mine = self._mine(costs, range(size))
        packed: list[tuple[list[int], list[int]]] = []  # requests and their lengths

        def packs() -> Iterator[PackedBatch]:
            for group in mine:
                batch = PackedBatch.concat([build(i) for i in group])
                split = batch.split(max(self.budget, batch.max_seqlen))
                for part, members in zip(split.parts, split.members, strict=True):
                    packed.append(([group[i] for i in members], part.host_lengths))
                    yield part

        def forward(batch: PackedBatch) -> tuple[Tensor, ...]:
            engine.hang.beat(self.step, "tasks")
            outputs = engine.model(batch, ["log_probs", "next_tokens"])
            return outputs["log_probs"], outputs["next_tokens"] == batch.labels, batch.labels

        found: dict[int, tuple[float, bool, int]] = {}
        with engine.model_engine.eval_mode():
            results = engine.model_engine.infer_micro_batches(packs(), forward)
            for index, (log_probs_T, is_top_T, labels_T) in enumerate(results):
                members, lengths = packed[index]
                tensors = log_probs_T, is_top_T, labels_T
                parts = [tensor_T.cpu().split(lengths) for tensor_T in tensors]
                for i, log_probs, is_top, labels in zip(members, *parts, strict=True):
                    has_label = labels != IGNORE
                    total = float(log_probs[has_label].double().sum())
                    found[i] = total, bool(is_top[has_label].all()), int(has_label.sum())
        return self._gathered(found, size)

    def completions(
        self,
        costs: Sequence[int] | None,
        settings: Sequence[Mapping[str, Any]],
        build: Callable[[int], PackedBatch],
    ) -> list[str]:
        """What the model writes after each prompt, up to the first stop string.

        `costs`: tokens of each prompt; None: they have media. `settings`: of the task's generation.
        """
        engine = self.engine
        alike: dict[str, list[int]] = {}
        for i, one in enumerate(settings):
            alike.setdefault(json.dumps(one, sort_keys=True, default=str), []).append(i)
        found: dict[int, str] = {}
        for indices in alike.values():
            decoding, until = self._decoding(settings[indices[0]])
            groups = self._mine(costs, indices)
            # Ranks that share one model complete their groups together.
            rounds = max(engine.world.all_gather(len(groups)))
            for round_ in range(rounds):
                group = groups[round_] if round_ < len(groups) else []
                engine.hang.beat(self.step, "tasks")
                parts = [build(i).without_targets() for i in group]
                prompts = PackedBatch.concat(parts) if parts else None
                written = complete(engine.model_engine, prompts, decoding, group or None)
                for i, completion in zip(group, written, strict=True):
                    text = engine.tokenizer.decode(completion.tokens, skip_special_tokens=True)
                    for end in until:
                        text = text.partition(end)[0]
                    found[i] = text
        return self._gathered(found, len(settings))

    def _decoding(self, settings: Mapping[str, Any]) -> tuple[Decoding, list[str]]:
        """How a task generates, and its stop strings, by the names that harnesses use."""
        left = dict(settings)
        until = left.pop("until", None) or []
        until = [end for end in ([until] if isinstance(until, str) else until) if end]
        for name in LENGTH_KEYS:
            left.pop(name, None)
        temperature = float(left.pop("temperature", None) or 0.0)
        if left.get("do_sample") is False:
            temperature = 0.0
        elif left.get("do_sample") and "temperature" not in settings:
            temperature = 1.0
        top_k, top_p = left.pop("top_k", None), left.pop("top_p", None)
        wrong = {name: value for name, value in left.items() if name not in UNUSED}
        if wrong or (left.get("num_beams") or 1) > 1:
            names = ", ".join(f"{name}={value}" for name, value in (wrong or left).items())
            raise UserError(
                f"a task's generation_kwargs have {names}: this engine decodes by temperature, top_k and top_p. Take "
                "it out of the task, or run it on an export: mvp export RUN FOLDER, then the harness's own command"
            )
        tokenizer = self.engine.tokenizer
        return Decoding(
            max_new_tokens(settings),
            self.engine.data.eos_token_ids,
            temperature,
            top_k or None,
            1.0 if top_p is None else top_p,
            seed=self.engine.config.seed,
            budget=self.budget,
            is_finished=stop_at(tokenizer, until) if until else None,
        ), until

    def _mine(self, costs: Sequence[int] | None, indices: Sequence[int]) -> list[list[int]]:
        """The requests that this rank packs together. All of them are planned, whatever the number of ranks."""
        groups: list[list[int]] = []
        room = 0
        for i in indices if costs is None else sorted(indices, key=lambda i: -costs[i]):
            size = self.budget // MEDIA_REQUESTS if costs is None else costs[i]
            if size > room or not groups:
                groups.append([])
                room = self.budget
            groups[-1].append(i)
            room -= size
        layout = self.engine.layout
        return list(islice(groups, layout.data_rank, None, layout.data_size))

    def _gathered(self, found: dict[int, Any], size: int) -> list[Any]:
        """The results of all ranks, in the order of the requests."""
        engine = self.engine
        results: dict[int, Any] = {}
        for part in engine.world.all_gather(found if engine.layout.is_mp_src_rank else {}):
            results |= part
        if len(results) != size:
            raise UserError(
                "the ranks have different requests of a task: does it choose its examples at random, or read files "
                "that only some machines have?"
            )
        return [results[i] for i in range(size)]


@cache
def lm_class() -> Any:
    """The model class of lm-eval: its own for transformers models, but for the forwards and the decoding."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import resolve_max_length

    class EngineLM(HFLM):
        """Tokenizes and truncates as lm-eval does for `--model hf`."""

        def __init__(self, requests: Requests) -> None:
            TemplateLM.__init__(self)
            engine = requests.engine
            template = requests.encoder.template.renderer.chat_template
            self.requests = requests
            self.tokenizer = engine.tokenizer
            self.backend = "causal"
            self.add_bos_token = None
            self.custom_prefix_token_id = None
            self.enable_thinking = None
            self.chat_template_args = {"chat_template": template} if template else {}
            self.batch_size_per_gpu = sys.maxsize  # windows of one long text, in one call
            self._max_length = resolve_max_length(engine.model.hf.config, engine.tokenizer)
            self._device = engine.device

        def get_model_info(self) -> dict[str, Any]:
            return {}  # the run folder has all of it

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            ids = [(before + answer)[-(self.max_length + 1) :] for _, before, answer in requests]
            lengths = [len(answer) for *_, answer in requests]
            scores = self.requests.log_likelihoods(
                [len(one) - 1 for one in ids],
                len(ids),
                lambda i: self.requests.text(ids[i], lengths[i]),
            )
            return [(total, is_greedy) for total, is_greedy, _ in scores]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            prompts, settings = zip(*(one.args[:2] for one in requests), strict=True)
            ids = [
                self.tok_encode(prompt, left_truncate_len=self._room(one)) or [self.prefix_token_id]
                for prompt, one in zip(prompts, settings, strict=True)
            ]
            return self.requests.completions(
                [len(one) for one in ids], settings, lambda i: self.requests.text(ids[i])
            )

        def _room(self, settings: Mapping[str, Any]) -> int:
            """Tokens that a prompt may have, when its completion is as long as it may get."""
            room = self.max_length - max_new_tokens(settings)
            if room < 1:
                raise UserError(
                    f"a task asks for {max_new_tokens(settings)} new tokens, and the model has positions for "
                    f"{self.max_length}: lower max_gen_toks in its generation_kwargs"
                )
            return int(room)

    return EngineLM


@cache
def lmms_class() -> Any:
    """The model class of lmms-eval."""
    from lmms_eval.api.instance import GenerationResult
    from lmms_eval.api.model import lmms

    class EngineLMMS(lmms):
        """Generation gets conversations (`doc_to_messages`), log-likelihoods a text and media (`doc_to_visual`)."""

        def __init__(self, requests: Requests, is_simple: bool, system: str | None) -> None:
            super().__init__()
            self.requests = requests
            self.is_simple = is_simple
            self.system = [{"role": "system", "content": system}] if system else []
            self.accelerator = None  # else the harness makes one

        def _doc(self, request: Any) -> Any:
            doc_id, task, split = request.args[3:6]
            return self.task_dict[task][split][doc_id]

        def generate_until(self, requests: Any) -> list[str]:
            def prompt(i: int) -> PackedBatch:
                messages = requests[i].args[1](self._doc(requests[i]))
                conversation = [*self.system, *map(message_of, messages)]
                return encode_prompt(self.requests.encoder, conversation)

            return self.requests.completions(None, [one.args[2] for one in requests], prompt)

        def loglikelihood(self, requests: Any) -> list[Any]:
            """The mean loss of each continuation: lmms-eval chooses the answer with the lowest.

            Version 0.7 makes a text of a pair, and takes it out of a GenerationResult as it is.
            """

            def row(i: int) -> PackedBatch:
                text, answer, visuals = requests[i].args[:3]
                doc = self._doc(requests[i])
                parts = [{"type": kind_of(one), "url": one} for one in visuals(doc) or []]
                asked = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
                answer = answer if isinstance(answer, str) else answer(doc)
                told = {"role": "assistant", "content": answer.strip()}
                return self.requests.answered([*self.system, message_of(asked), told])

            scores = self.requests.log_likelihoods(None, len(requests), row)
            pairs = [(-total / max(size, 1), is_greedy) for total, is_greedy, size in scores]
            return [GenerationResult(pair) for pair in pairs]

        def generate_until_multi_round(self, requests: Any) -> list[str]:
            raise UserError(
                "tasks of several rounds (generate_until_multi_round) are not supported: run them on an export, with "
                "a model class of lmms-eval"
            )

    return EngineLMMS


def kind_of(item: Any) -> str:
    """What `doc_to_visual` returns: images are pictures, sounds have an array of samples, videos are paths."""
    if isinstance(item, Mapping):
        return "video" if item.get("array") is None else "audio"
    suffix = Path(item).suffix.lower() if isinstance(item, str) else ".png"
    if suffix in (".wav", ".mp3", ".m4a", ".flac", ".ogg", ".opus"):
        return "audio"
    return "image" if suffix in (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif") else "video"


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of lmms-eval as one of a row. Samples of a sound become a WAV file in memory."""
    if isinstance(message["content"], str):
        return dict(message)
    parts = []
    for part in message["content"]:
        kind, value = part["type"], part.get("url", part.get("text"))
        if isinstance(value, Mapping) and value.get("array") is not None:  # of kind video there
            file = io.BytesIO()
            write = require_package("soundfile", "audio").write
            write(file, np.asarray(value["array"]), value["sampling_rate"], "FLOAT", format="WAV")
            kind, value = "audio", {"bytes": file.getvalue()}
        parts.append({"type": kind, kind: value})
    return {"role": message["role"], "content": parts}


def max_new_tokens(settings: Mapping[str, Any]) -> int:
    """The most tokens of a completion, by the names that tasks have for it."""
    found = (settings[name] for name in LENGTH_KEYS if settings.get(name) is not None)
    return int(next(found, MAX_NEW_TOKENS))


# ---- Tasks ------------------------------------------------------------------------------------------


def check(tasks: Tasks) -> None:
    """Raise if a package, a file or a name is missing: before a training, not hours later."""
    for task in tasks:
        place(task.task)


def evaluate_in(engine: Any, ctx: StepContext) -> None:
    """Run `eval_harness.tasks` in an evaluation: in a training in every n-th, and in the last one."""
    settings = engine.config.eval_harness
    steps = engine.config.eval.steps if engine._training else None
    is_last = engine.done or engine.step == engine.total_steps
    if steps is None or is_last or engine.step // int(steps) % settings.every == 0:
        # Ranks that wait for each other cannot continue after an error of one.
        with engine.keep_training(ctx, "eval_harness", engine.world.size == 1):
            run_tasks(engine, ctx, settings.tasks)


def evaluate(engine: Any, tasks: Tasks | None = None) -> dict[str, float | None]:
    """Tasks, by default those of `eval_harness`, without held-out rows, on the weights in memory: their metrics."""
    if tasks is None:
        if engine.config.eval_harness is None:
            raise UserError(
                "eval_harness.tasks: which tasks? mvp evaluate RUN --tasks NAME,FILE.yaml"
            )
        tasks = engine.config.eval_harness.tasks
    step = engine.weights_step or engine.step
    ctx = StepContext(step, engine.epoch, "eval", engine._metric_store(False))
    with engine.eval_weights(), engine.model_engine.eval_mode():
        run_tasks(engine, ctx, tasks)
    means: dict[str, float | None] = ctx.metrics.reduce()[0]
    engine.hub.metrics({"step": step, "epoch": ctx.epoch, "split": "eval", **means})
    rewrite_page(engine)
    return means


def run_tasks(engine: Any, ctx: StepContext, tasks: Tasks) -> None:
    """Run tasks and log their metrics. All ranks call it, in `eval_mode`."""
    check_writes(engine.model, "eval_harness")
    before = rng_state()
    requests = Requests(engine, ctx.step)
    logged: dict[str, float] = {}
    for task in tasks:
        with as_one_rank():
            results = _run(requests, task)
        scores = scores_of(results)
        for name, score in scores.items():
            if name in logged:
                raise UserError(f"eval_harness.tasks: {name} comes twice; leave an entry out")
            logged[name] = score["value"]
        if engine.world.is_main:
            _write(engine.run.dir / "tasks", ctx.step, scores, results.get("samples") or {})
    set_rng_state(before)
    for name, value in logged.items():
        if engine.layout.is_metrics_rank:  # it is the same on all ranks, and counts once
            ctx.log(name, value)
        engine.logger.info("%s: %s", name, number(value))


def scores_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a harness returns, as scores by name: `TASK/METRIC`, of a task with filters `TASK/METRIC/FILTER`."""
    scores = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or "_stderr" in metric or not isinstance(value, float | int):
                continue
            errors = (values.get(f"{metric}_{name},{kind}") for name in ("stderr", "stderr_clt"))
            scores["/".join([task, metric, *[kind] * (kind != "none")])] = {
                "value": float(value),
                "stderr": next((one for one in errors if isinstance(one, float)), None),
                "examples": results["n-samples"].get(task, {}).get("effective"),
                "fewshot": results["n-shot"].get(task),
                "version": results["versions"].get(task),
            }
    return scores


def _write(folder: Path, step: int, scores: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    """Scores, with those that are there, in `step_N.json`, and each sample in `step_N_TASK.jsonl`."""
    folder.mkdir(exist_ok=True)
    file = folder / f"step_{step}.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    atomic_write_text(file, json.dumps({**kept, **scores}, indent=2, default=str))
    for task, found in samples.items():
        lines = [json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in found]
        atomic_write_text(folder / f"step_{step}_{task}.jsonl", "".join(lines))


def _run(requests: Requests, task: HarnessTask) -> dict[str, Any]:
    """The results of a task or a group of tasks, as its harness returns them."""
    harness, name = place(task.task)
    return (_run_lmms if harness == "lmms" else _run_lm)(requests, task, name)


def place(task: str) -> tuple[str, str]:
    """The harness of a task, and its name or file there."""
    harness, _, name = task.rpartition(":")
    if harness and harness not in PACKAGES:
        raise UserError(f"eval_harness.tasks: {task}: give a name, a file, lm:NAME or lmms:NAME")
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise UserError(f"eval_harness.tasks: {name}: no such file")
        text = Path(name).read_text(encoding="utf-8")
        harness = harness or ("lmms" if any(f"{key}:" in text for key in LMMS_KEYS) else "lm")
        _require(harness)
        return harness, name
    asked = [harness] if harness else list(filter(_is_installed, PACKAGES))
    known: list[str] = []
    for one in asked or ["lm"]:
        _require(one)
        names = _manager(one).all_tasks
        if name in names:
            return one, name
        known += names
    hint = did_you_mean(name, known)
    raise UserError(
        f"eval_harness.tasks: no task of {' or '.join(asked)} is called {name!r}.{hint}"
    )


def _is_installed(harness: str) -> bool:
    return importlib.util.find_spec(PACKAGES[harness]) is not None


def _require(harness: str) -> None:
    if not _is_installed(harness):
        extra = PACKAGES[harness].replace("_", "-")
        how = {"lm": "pip install 'mvp-engine[lm-eval]'", "lmms": INSTALL_LMMS}[harness]
        raise UserError(f"eval_harness.tasks needs the package {extra}: {how}")


@cache
def _manager(harness: str, with_defaults: bool = True) -> Any:
    """The index of a harness's own tasks. Reading it takes seconds, which a task in a file saves."""
    module = importlib.import_module(f"{PACKAGES[harness]}.tasks")
    return module.TaskManager(include_defaults=with_defaults)


def _run_lm(requests: Requests, task: HarnessTask, name: str) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    has_template = bool(requests.encoder.template.renderer.chat_template)
    with named_in_errors(task.task):
        results = simple_evaluate(
            lm_class()(requests),
            tasks=[name],
            num_fewshot=task.fewshot,
            limit=task.limit,
            system_instruction=task.system,
            apply_chat_template=has_template if task.chat_template is None else task.chat_template,
            task_manager=_manager("lm", not Path(name).is_file()),
            bootstrap_iters=1000,
        )
    return dict(results)


def _run_lmms(requests: Requests, task: HarnessTask, name: str) -> dict[str, Any]:
    timeout = distributed_c10d.default_pg_timeout
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.utils import load_yaml_config

    # Its import sets 24 hours for all later process groups.
    distributed_c10d.default_pg_timeout = timeout
    tasks: list[Any] = [name]
    is_file = Path(name).is_file()
    manager = _manager("lmms", not is_file)
    with named_in_errors(task.task):
        file = name if is_file else manager.task_index[name]["yaml_path"]
        config = {} if file == -1 else load_yaml_config(file, mode="full")  # -1: a tag
        is_simple = config.get("output_type") in ("multiple_choice", "loglikelihood")
        if is_file:
            kind = "simple" if is_simple else "chat"
            (found,) = manager.load_task_or_group([config], kind).items()
            found[1].config.task = found[0]
            tasks = [found[1]]
        results = simple_evaluate(
            model=lmms_class()(requests, is_simple, task.system),
            tasks=tasks,
            num_fewshot=task.fewshot,
            limit=task.limit,
            task_manager=manager,
            bootstrap_iters=0,  # it would start processes
            verbosity="ERROR",
        )
    return dict(results)


@contextmanager
def named_in_errors(task: str) -> Iterator[None]:
    """A context in which what a harness, or the code of a task, raises names the task."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in task {task}")
        raise


@contextmanager
def as_one_rank() -> Iterator[None]:
    """A context in which a harness sees one rank and starts no processes: sharing requests is ours."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISABLE_MULTIPROC": "1"}
    before = {name: os.environ.get(name) for name in one}
    os.environ.update(one)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
