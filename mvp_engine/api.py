"""Training from Python.

    run = mvp_engine.train("sft/lora", model="Qwen/Qwen3-0.6B", data="rows.jsonl", optim={"lr": 1e-4})
    run.evaluate()
    run.generate(["What is in this photo?"], images=["photo.jpg"])

`mvp train` is the same training: the same config, the same run folder, the same bits. Here a user error is raised as
`UserError`, and the model stays in memory until `close`. Under torchrun, or in a process group that exists already, all
ranks make the same calls.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import operator
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from mvp_engine.config.compose import Composed, compose, read_draft, word
from mvp_engine.config.engine_class import check_workflow
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.decoding import Decoding, complete, stop_at
from mvp_engine.kit.generation import encode_prompt
from mvp_engine.kit.settings import EvalHarness
from mvp_engine.launch import join, run_workflow
from mvp_engine.log import LogHub
from mvp_engine.log.backends import RunInfo
from mvp_engine.runs import Run, trained_run

MEDIA = ("images", "videos", "audios")
Rows = str | Path | Iterable[Mapping[str, Any]]


def train(
    config: str | Path,
    *words: str,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Rows | Mapping[str, Any] | None = None,
    eval_data: Rows | None = None,
    engine: type[Engine] | None = None,
    **keys: Any,
) -> Training:
    """Train; returns the training with its model in memory.

    `config` is a YAML file or a shipped config. `words` are overrides as on the command line, `keys` the same as
    keywords: `optim={"lr": 1e-4}`, `run_name="mine"`. `data` and `eval_data` are paths, or rows in memory: a list, a
    `datasets.Dataset`, a torch dataset; they replace the config's source of their split. `engine` replaces the class
    that the config names. As dicts, `model` and `data` are sections of the config, too.
    """
    for name, given in (("model", model), ("data", data)):
        if isinstance(given, Mapping):
            keys[name] = given
    overrides = [*words, *(word(key, value) for key, value in keys.items())]
    if model is not None and "model" not in keys:
        overrides.append(word("model.path", str(model)))
    if data is not None and not isinstance(data, Mapping):
        source = _source_of("train", config, overrides)
        overrides.append(word(f"{source}.path", _path_of(data, config, overrides)))
        if eval_data is not None:  # instead of a share of the rows
            overrides.append(f"{source}.hold_out=null")
    if eval_data is not None:
        held_out = {"path": _path_of(eval_data, config, overrides), "split": "eval"}
        overrides.append(word(_source_of("eval", config, overrides), held_out))
    return Training(config, overrides, engine)


def load(run: str | Path = "latest", *, root: str | Path = "outputs") -> Training:
    """A run with the model of its best checkpoint: to evaluate, to generate, to export, or to continue."""
    folder = trained_run(str(run), Path(root)).dir
    words = ["workflow=evaluate", word("resume", str(folder))]
    return Training(folder / "config.yaml", words, None, Engine.before_evaluate)


class Metrics(list[dict[str, Any]]):
    """The records of `metrics.jsonl`: one for each log interval and evaluation, in their order."""

    def to_pandas(self) -> Any:
        """As a table, with a column for each metric; those of `perf` and `totals` have a dot in their name."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise UserError("to_pandas() needs the package pandas: pip install pandas") from None

        return pandas.json_normalize(list(self))


class Training:
    """A training that has ended, with its model. It is a context, which closes it."""

    def __init__(
        self,
        config: str | Path,
        words: Sequence[str],
        engine: type[Engine] | None,
        work: Callable[[Engine], None] | None = None,
    ) -> None:
        """`work`: what is run before this returns; None: the config's workflow."""
        self._config = config
        self._words = list(words)
        self._class = engine
        composed = compose(config, self._words, engine)
        if work is None:
            check_workflow(composed.engine_class, composed.config.workflow)
            work = operator.methodcaller(composed.config.workflow)
        self._world = join(composed.config)
        try:
            self._engine: Engine | None = self._run(composed, work)
        except BaseException:
            if self._world.size == 1:
                self._world.close()
            raise
        self.run: Run = self._engine.run
        self._world.barrier()  # the files of the run are complete on all ranks

    def _run(self, composed: Composed, work: Callable[[Engine], None]) -> Engine:
        def keep(engine: Engine) -> None:
            work(engine)
            engine.hub.__exit__(None, None, None)  # a later run of this process has its own

        return run_workflow(composed, self._world, keep)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"at step {self.step}"
        return f"<Training {self.folder}, {state}>"

    @property
    def engine(self) -> Engine:
        """The recipe's engine, with `model`, `model_engine` and `config`."""
        if self._engine is None:
            raise UserError(
                f"the training in {self.folder} is closed: mvp_engine.load({str(self.folder)!r}) opens it again"
            )
        return self._engine

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run.dir

    @property
    def step(self) -> int:
        """The optimizer steps that the weights in memory have been trained for."""
        return self.engine.weights_step or self.engine.step

    @property
    def metrics(self) -> Metrics:
        return Metrics(self.run.records())

    def evaluate(
        self, tasks: Sequence[str | Mapping[str, Any]] | None = None
    ) -> dict[str, float | None]:
        """The metrics of the held-out rows by the weights in memory; `evaluate.jsonl` of the run gets them too.

        `tasks`: of evaluation harnesses instead, as in `eval_harness.tasks`: `["gsm8k", "my/task.yaml"]`.
        """
        engine: Any = self.engine
        config = engine.config
        info = RunInfo(self.run, config.run_name, "evaluate", config.model_dump(), engine.step)
        with LogHub(info, config.log.backends, self._world.rank) as engine.hub:
            if tasks is not None:
                from mvp_engine.kit import harness

                section = EvalHarness.model_validate({"tasks": list(tasks)})
                return harness.evaluate(engine, section.tasks)
            engine.eval_metrics = engine._evaluate()
            return engine.eval_metrics

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audios: Sequence[Any] | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> list[str]:
        """The answer to each prompt, which is a text or a list of messages, by the weights in memory.

        `images`, `videos` and `audios` have an entry for each prompt: a file, a picture, a list of these, or None.
        """
        engine: Any = self.engine
        if not hasattr(engine, "data") or "next_logits" not in getattr(
            engine.model, "provides", ()
        ):
            raise UserError(f"{type(engine).__name__} trains no model that writes text")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ends = list(filter(None, [stop] if isinstance(stop, str) else stop))
        if not texts:
            return []
        conversations = _conversations(
            texts, dict(zip(MEDIA, (images, videos, audios), strict=True))
        )
        encoder = engine.data.row_encoder
        packed = PackedBatch.concat([encode_prompt(encoder, one) for one in conversations])
        decoding = Decoding(
            max_new_tokens,
            engine.data.eos_token_ids,
            temperature,
            top_k,
            top_p,
            seed=seed,
            budget=engine.config.data.tokens_per_pack,
            is_finished=stop_at(engine.tokenizer, ends) if ends else None,
        )
        with engine.eval_weights():
            completions = complete(engine.model_engine, packed, decoding)
        written = [
            str(engine.tokenizer.decode(one.tokens, skip_special_tokens=True))
            for one in completions
        ]
        for end in ends:
            written = [text.partition(end)[0] for text in written]
        return written

    def export(self, path: str | Path | None = None) -> Path:
        """Write the weights in memory as a Hugging Face folder, into the run folder or to `path`, which must be new."""
        engine: Any = self.engine
        if not hasattr(engine, "export"):
            raise UserError(f"{type(engine).__name__} has no export()")
        target = None if path is None else Path(path).expanduser().absolute()
        if self._world.any(target is not None and self._world.is_main and target.exists())[0]:
            raise UserError(f"export: {target} exists; give a path that does not")
        folder: Path = engine.export()
        if target is None:
            return folder
        if self._world.is_main:
            shutil.copytree(folder, target)
        self._world.barrier()
        return target

    def continue_training(self, *words: str, steps: int | None = None, **keys: Any) -> None:
        """Train on from the newest checkpoint of this run, as `mvp train ... resume=RUN` does, with changed keys.

        `steps` more than it has made; without it, as `train.max_steps` or `train.epochs` among the keys say.
        """
        more = [*words, *(word(key, value) for key, value in keys.items())]
        if steps is not None:
            newest = self.engine.step  # `step` may be that of the best checkpoint
            more += [f"train.max_steps={newest + steps}", "train.epochs=null"]
        changed = {one.partition("=")[0] for one in more} | {"resume", "workflow", "run_id"}
        kept = [one for one in self._words if one.partition("=")[0] not in changed]
        kept += [*more, "workflow=train", word("resume", str(self.folder)), "run_id=null"]
        composed = compose(self._config, kept, self._class)  # its errors leave this as it is
        self._close_engine()
        self._words = kept
        self._engine = self._run(composed, Engine.train)
        self.run = self._engine.run
        self._world.barrier()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.__exit__(None, None, None)
            engine.run.unlock()

    def close(self) -> None:
        """Free the model and the processes of the loader. What the run wrote stays."""
        if self._engine is not None:
            self._close_engine()
            self._world.close()


def _conversations(
    prompts: Sequence[str | Sequence[Mapping[str, Any]]], media: Mapping[str, Sequence[Any] | None]
) -> list[list[Mapping[str, Any]]]:
    """Prompts as messages, with their media before the text of the last one."""
    conversations = []
    one_each = str | Path | Image.Image  # of a single prompt
    media = {kind: [v] if isinstance(v, one_each) else v for kind, v in media.items()}
    for name, items in media.items():
        if items is not None and len(items) != len(prompts):
            raise UserError(
                f"generate: {len(items)} {name} for {len(prompts)} prompts: give an entry for each"
            )
    for index, prompt in enumerate(prompts):
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        parts: list[dict[str, Any]] = []
        for name, items in media.items():
            entry = None if items is None else items[index]
            entries = entry if isinstance(entry, list | tuple) else [entry]
            kind = name.removesuffix("s")
            parts += [{"type": kind, kind: one} for one in entries if one is not None]
        if parts:
            content = messages[-1]["content"]
            texts = (
                [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            )
            messages[-1] = {**messages[-1], "content": [*parts, *texts]}
        conversations.append(messages)
    return conversations


# ---- Rows in memory ---------------------------------------------------------------------------------


def _source_of(split: str, config: str | Path, overrides: Sequence[str]) -> str:
    """The key of the config's source of a split; of a new one, if it has none."""
    sources = (read_draft(config, overrides).values.get("data") or {}).get("sources")
    by_name = enumerate(sources) if isinstance(sources, list) else (sources or {}).items()
    names = [str(name) for name, one in by_name if one and one.get("split", "train") == split]
    if len(names) > 1:
        option = "data" if split == "train" else "eval_data"
        raise UserError(
            f"{option} stands for one source of split {split}, and {config} has {len(names)}: set the path of one with "
            f"a word, data.sources.{names[0]}.path=FILE"
        )
    new = "rows" if split == "train" else "eval_rows"
    return f"data.sources.{names[0] if names else new}"


def _path_of(rows: Rows, config: str | Path, overrides: Sequence[str]) -> str:
    """The file of some rows. Those in memory are written next to the runs, where a resume finds them again.

    The name is a hash of the rows: the same rows are the same file, and a plan of their costs is kept.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    if not hasattr(rows, "__iter__"):  # a torch dataset
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise UserError(
                f"data is a {type(rows).__name__}: give a path, or rows as a list or a dataset"
            )
        rows = [rows[index] for index in range(len(rows))]  # type: ignore[arg-type]
    lines = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(
                f"data: row {index} is a {type(row).__name__}: give dicts, such as {{'messages': [...]}}"
            )
        try:
            lines.append(json.dumps(_in_json(row), ensure_ascii=False) + "\n")
        except TypeError as error:
            raise UserError(
                f"data: row {index}: {error}; pictures, bytes, texts and numbers can be written"
            ) from None
    if not lines:
        raise UserError("data: there are no rows")
    text = "".join(lines)
    root = read_draft(config, overrides).values["output_dir"]
    folder = Path(root).expanduser().absolute() / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.jsonl"
    if not file.is_file():
        atomic_write_text(file, text)
    return str(file)


def _in_json(value: Any) -> Any:
    """A value as JSON has it: pictures and bytes as data URIs, arrays as pictures or lists."""
    if isinstance(value, Mapping):
        return {key: _in_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if getattr(value, "ndim", 0) == 3 and str(value.dtype) == "uint8":
        value = Image.fromarray(value)
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "png")
        value = file.getvalue()
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    with suppress(AttributeError):
        return value.tolist()  # numpy and torch
    return value
