"""MLLMEngine: the kits wired into an engine for multimodal language models.

It trains on rows of text, images, video and audio, evaluates by loss and by generation, exports, and writes a report.
A recipe subclasses it and overrides what it changes, or wires the kits itself where it changes much:

    class MyEngine(MLLMEngine):
        def score(self, ctx, name, answers):
            verdicts = [one.expected in one.written for one in answers]
            ctx.log(f"accuracy_{name}", sum(verdicts), len(verdicts))
            return verdicts  # marked on the report page
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_symlink
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit.auto import smaller_after_out_of_memory, with_choice
from mvp_engine.kit.data import MLLMDataKit, load_processor
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.kit.examples import examples_of
from mvp_engine.kit.generation import (
    Answer,
    Prompt,
    Verdicts,
    check_writes,
    generate_answers,
    with_verdicts,
    write_answers,
)
from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.model import MLLMModelKit, compile_blocks, export_link, prepare_kernels
from mvp_engine.kit.optim import OptimKit
from mvp_engine.kit.row_checks import check_rows, refuse_preference_rows, row_groups
from mvp_engine.kit.settings import MLLMConfig
from mvp_engine.report import write_report
from mvp_engine.report.facts import metric_texts


class MLLMEngine(Engine):
    """An engine with model, data, loss, optimizer and MFU from the kits."""

    config_class: type[Config] = MLLMConfig
    config: MLLMConfig
    title = "What the model answers"  # of the report
    batch_unit = "pack"
    eval_metrics: dict[str, float | None] | None = None  # of the last evaluation
    answers: Sequence[Answer] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config = with_choice(self)  # numbers in place of `auto`

    # ---- Parts: a recipe may replace each -----------------------------------------------------------------

    @classmethod
    def make_processor(cls, config: MLLMConfig) -> Any:
        """The processor or tokenizer. A recipe with synthetic data builds the data here too."""
        folder = config.processor or config.model.path
        if folder is None:
            raise UserError(
                "no processor: set model.path to a model's folder or to a model of the Hub, or processor to one "
                "that has it"
            )
        return load_processor(folder)

    @classmethod
    def data_kit(cls, config: MLLMConfig) -> MLLMDataKit:
        """The data kit; `mvp data inspect` and `mvp check` use it too."""
        config.check_engine()
        model_config = read_config(config.model.path, config.model.config)
        return MLLMDataKit(
            config.mllm,
            cls.make_processor(config),
            model_config=model_config,
            num_workers=config.data.num_workers,
        )

    @cached_property
    def data(self) -> MLLMDataKit:
        return self.data_kit(self.config)

    @cached_property
    def optim(self) -> OptimKit:
        return OptimKit(self.config.optim, self.config.seed)

    @cached_property
    def loss(self) -> Any:
        """The loss kit of `forward_step`: `(loss_sum, weight)` of a micro-batch."""
        return TokenNormedLossKit(self.config.loss)

    @property
    def global_batch_size(self) -> int:
        """Packs in one optimizer step: `data.global_batch_size`, or `mllm.global_batch_tokens` in packs."""
        packs = self.config.mllm.global_batch_packs(self.config.data.global_batch_size)
        return super().global_batch_size if packs is None else packs

    @property
    def tokenizer(self) -> Any:
        return getattr(self.data.processor, "tokenizer", self.data.processor)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> Verdicts | None:
        """Log metrics of the answers to the prompts of one source; by default the share of exact matches.

        It may return which answers are right (None: neither right nor wrong), for the report page. By default there
        are no such verdicts: a free-form answer may be good in other words. Continuations of plain text are never
        compared, so a source of texts has no such metric.
        """
        judged = [answer for answer in answers if not answer.is_continuation]
        if judged:
            ctx.log(f"exact_{name}", sum(answer.right for answer in judged), len(judged))
        return None

    def generation_rows(self, micro_batch: PackedBatch) -> Tensor:
        """Which sequences of an evaluation get a generated answer: a mask. By default every n-th sample."""
        settings = self.config.eval_generation
        assert settings is not None
        sample_S = micro_batch.sequence_fields["sample"]
        every = settings.every_n_samples
        if settings.max_samples is None:
            return sample_S % every == 0
        if self.data.is_stream("eval"):  # of unknown length: the first ones
            return (sample_S % every == 0) & (sample_S < every * settings.max_samples)
        return torch.isin(sample_S, self._completed_samples.to(sample_S.device))

    @cached_property
    def _completed_samples(self) -> Tensor:
        """At most `max_samples` of the samples that an evaluation reads, evenly spread."""
        settings: Any = self.config.eval_generation
        loader: Any = self._eval_loader
        samples = loader.dataset.samples(loader.size)
        every = max(settings.every_n_samples, -(-len(samples) // settings.max_samples))
        return samples[::every]

    # ---- Hooks --------------------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        model: Any = MLLMModelKit(self.config.lora).build(self.config.model, self.config.model.type)
        check_writes(model, "eval_generation" if self.config.eval_generation else None)
        # The processor with the limits of this training goes into checkpoints and exports.
        model.side_files = self.run.dir / "processor"
        if self.world.is_main:
            self.data.save_processor(model.side_files, self.config.model.path)
        return model

    def prepare_optimizer(self, model: nn.Module) -> Optimizer:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    def prepare_dataloader(self, split: str) -> Any:
        return self.data.engine_loader(self, split)

    def before_train(self) -> None:
        export_link(self.config.export)
        super().before_train()
        self.mfu = MFUKit(self.model)  # type: ignore[arg-type]

    @property
    def measured_splits(self) -> list[str]:
        return ["train", "eval"] if self.config.loop.eval_interval else ["train"]

    def start_data(self) -> None:
        """Open the data, or start to measure rows whose costs are not in the cache, while the model is built."""
        self._closing.callback(self.data.stop_measuring)
        is_measuring = self.world.any(self.data.measure_ahead(self.measured_splits))[0]
        prepare_kernels(self.device, self.config.model)
        if not is_measuring:
            super().start_data()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        if not self.has_data:
            with smaller_after_out_of_memory(self):
                compile_blocks(self)
        return super().build_optimizer(model)

    def open_data(self) -> None:
        if self.config.loop.eval_interval:
            # Errors in held-out rows are raised now, not after hours of training.
            self._eval_loader = self._loader("eval")
        super().open_data()
        if isinstance(self.feed.loader, PackLoader) and self.checkpoint is None:
            self._closing.enter_context(self.feed.loader.started())

    def do_train(self) -> None:
        with smaller_after_out_of_memory(self):
            super().do_train()

    def train_pre_step(self, ctx: StepContext) -> None:
        model: Any = self.model
        check_rows(self, ctx, model.check)  # on the host: on a GPU it would be a host sync
        self.mfu.count(ctx)
        num_tokens = sum(map(self.num_positions, ctx.micro_batches))
        capacity = self.config.mllm.tokens_per_pack * len(ctx.micro_batches)
        ctx.log("fill", num_tokens, capacity)  # the share of the packs that is no free space
        if ctx.plan is None:  # of a stream; else the plan has the number of rows
            ctx.count("samples", sum(len(row_groups(batch)) for batch in ctx.micro_batches))

    def num_positions(self, batch: PackedBatch) -> int:
        """What a micro-batch holds of the budget of a pack."""
        return batch.num_tokens

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        refuse_preference_rows(micro_batch)
        log_sources = partial(self._log_source_losses, ctx, micro_batch)
        return self.loss(ctx, self.model, micro_batch, log_sources)

    def after_train(self) -> None:
        super().after_train()
        # Loaders of the data kit have an end report, others may not.
        end_report = getattr(self.feed.loader, "end_report", None)
        report = end_report() if end_report and self.world.is_main else None
        if report:
            self.logger.warning("%s", report)
        export = None
        if self.config.export is not None:
            self.load_best()
            export = self.export()
        answers = self._gather_answers()
        if self.world.is_main and "plot" in self.config.log.backends:
            try:
                self.write_page(self.eval_metrics, answers, export)
            except Exception:
                self.logger.warning("report.html could not be written:", exc_info=True)

    def evaluate(self) -> dict[str, float | None]:
        self.generation_batches: list[PackedBatch] = []
        self.eval_metrics = super().evaluate()
        return self.eval_metrics

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        super().eval_step(ctx, micro_batch)
        settings = self.config.eval_generation
        if settings is None or ctx.is_dummy:
            return
        chosen = self.generation_rows(micro_batch).nonzero()[:, 0].tolist()
        if chosen:
            # On the CPU: the device could not hold the images of a whole evaluation.
            self.generation_batches.append(micro_batch.select(chosen).to("cpu"))

    def eval_end(self, ctx: StepContext) -> None:
        settings = self.config.eval_generation
        if settings is None:
            return
        self.answers = []
        completions: list[tuple[Prompt, list[int]]] = []
        # Where ranks run one forward together, the others wait in it: then the job cannot continue.
        runs_alone = self.layout.data_size == self.world.size and self.layout.shard_mesh is None
        with self.keep_training(ctx, "generation", runs_alone):
            self.answers = generate_answers(
                self.model_engine,
                self.generation_batches,
                self.tokenizer,
                max_new_tokens=settings.max_new_tokens,
                prompt_tokens=settings.prompt_tokens,
                stop=self.data.eos_token_ids,
                budget=self.config.mllm.tokens_per_pack,
                keep=completions,
            )
        self.after_generation(ctx, completions)
        with self.keep_training(ctx, "score"):
            for i, name in enumerate(self.data.source_names("eval")):
                own = [answer for answer in self.answers if answer.source == i]
                others = [answer for answer in self.answers if answer.source != i]
                self.answers = others + with_verdicts(own, self.score(ctx, name, own))
        answers = self._gather_answers()
        with self.keep_training(ctx, "writing answers.jsonl"):
            if self.world.is_main:
                names = self.data.source_names("eval")
                write_answers(self.run.dir / "answers.jsonl", ctx.step, names, answers)

    def after_generation(
        self, ctx: StepContext, completions: Sequence[tuple[Prompt, list[int]]]
    ) -> None:
        """Called before `score`, with the prompts of `self.answers` and the tokens that complete them."""

    @contextmanager
    def keep_training(
        self, ctx: StepContext, what: str, can_continue: bool = True
    ) -> Iterator[None]:
        """An error inside is a warning if it happens in an evaluation of a training; `mvp check` raises it."""
        in_training = self._training and self.config.loop.eval_interval is not None
        try:
            yield
        except Exception as error:
            if not in_training or not can_continue:
                raise
            self.logger.warning(
                "%s failed in the evaluation at step %d, which has no metrics of it; the training continues. %s: %s",
                what,
                ctx.step,
                type(error).__name__,
                error,
                exc_info=True,
            )
            if self.config.checkpoint.best_metric is not None:
                # Without another value, its mean is None.
                ctx.log(self.config.checkpoint.best_metric, 0.0, 0.0)

    # ---- Workflows ----------------------------------------------------------------------------------------

    def export(self) -> Path:
        """Write a Hugging Face folder of the current weights, or of their averages (EMA); adapters are merged."""
        link = export_link(self.config.export)
        if not self._training and not hasattr(self, "model_engine"):
            self.before_evaluate()
        suffix = "" if self.config.optim.ema is None else "_ema"
        folder = self.run.dir / f"hf_step_{self.weights_step or self.step}{suffix}"
        if not self.world.broadcast(folder.exists()):
            with self.eval_weights():
                self.model_engine.export_hf(folder)
        if self.world.is_main and link is not None:
            link.parent.mkdir(parents=True, exist_ok=True)
            atomic_symlink(link, os.path.relpath(folder.resolve(), link.parent.resolve()))
        linked = f", also found as {link}" if link else ""
        self.logger.info("Hugging Face folder: %s%s", folder, linked)
        return folder

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and write a page with curves, prompts, their media, and answers."""
        export_link(self.config.export)
        figures = self.evaluate()
        export = self.export()
        answers = self._gather_answers()
        if self.world.is_main:
            self.write_page(figures, answers, export)

    def write_page(
        self, figures: Mapping[str, float | None] | None, answers: list[Answer], export: Path | None
    ) -> None:
        """Write `report.html` into the run folder, at the end of a training and by `workflow=report`.

        `figures` are the metrics of the last evaluation, None without one. `export` is the exported folder, if any.
        """
        write_report(
            self.run.dir / "report.html",
            self.run,
            title=self.title,
            subtitle=f"{self.run.id}, step {self.step}, on held-out rows",
            figures=None if figures is None else self.page_figures(figures),
            examples=examples_of(self.data, "eval", answers),
            config=self.config.to_yaml(),
        )
        self.logger.info("report: %s", self.run.dir / "report.html")

    def page_figures(self, figures: Mapping[str, float | None]) -> dict[str, str]:
        """Metrics as text for the report page, shares in percent, and the size of the model."""
        size = trained_parts(self.model)[-1]["parameters"]
        return {**metric_texts(figures), "parameters": f"{size:,}"}

    # ---- Inside -------------------------------------------------------------------------------------------

    def _gather_answers(self) -> list[Answer]:
        """The answers of all ranks, in the order of their samples."""
        has_answers = self.config.eval_generation and self.layout.is_mp_src_rank
        gathered = self.world.all_gather(list(self.answers) if has_answers else [])
        return sorted(chain.from_iterable(gathered), key=lambda answer: answer.sample)

    def _log_source_losses(self, ctx: StepContext, batch: PackedBatch, loss_T: Tensor) -> None:
        if len(self.data.source_names(ctx.split)) == 1:
            return  # it is the loss itself
        losses = self.data.source_losses(-loss_T, batch, ctx.split)
        for name, (loss_sum, weight) in losses.items():
            ctx.log(name, loss_sum, weight)
