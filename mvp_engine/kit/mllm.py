"""MLLMEngine: what engines of language models share. Each method is a hook that calls a kit; recipes override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit import examples, generation, row_checks
from mvp_engine.kit import model as model_kit
from mvp_engine.kit.auto import smaller_after_out_of_memory, with_choice
from mvp_engine.kit.data import MLLMDataKit, load_processor
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.kit.generation import Answer, Completions, EvalGenerationKit, Verdicts
from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.optim import OptimKit
from mvp_engine.kit.settings import MLLMConfig


class MLLMEngine(Engine):
    config_class: type[Config] = MLLMConfig
    config: MLLMConfig
    title = "What the model answers"  # of the report
    batch_unit = "pack"
    answers: Sequence[Answer] = ()  # of this rank, in the last evaluation

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config = with_choice(self)  # numbers in place of `auto`

    def prepare_model(self) -> nn.Module:
        return model_kit.MLLMModelKit(self.config.lora).of_engine(self)

    @classmethod
    def make_processor(cls, config: MLLMConfig) -> Any:
        """The processor or tokenizer. A recipe with synthetic data builds the data here too."""
        return load_processor(config.processor or config.model.path)

    @classmethod
    def data_kit(cls, config: MLLMConfig) -> MLLMDataKit:
        """The data kit; `mvp data inspect` and `mvp check` use it too."""
        return MLLMDataKit.of(config, cls.make_processor)

    @cached_property
    def data(self) -> MLLMDataKit:
        return self.data_kit(self.config)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.data.processor, "tokenizer", self.data.processor)

    @property
    def global_batch_size(self) -> int:
        """Packs in one optimizer step: `data.global_batch_size`, or `data.global_batch_tokens` in packs."""
        packs = self.config.data.global_batch_packs(self.config.data.global_batch_size)
        return super().global_batch_size if packs is None else packs

    @property
    def measured_splits(self) -> list[str]:
        return ["train", "eval"] if self.config.eval.steps else ["train"]

    def start_data(self) -> None:
        self._closing.callback(self.data.stop_measuring)
        is_measuring = self.world.any(self.data.measure_ahead(self.measured_splits))[0]
        model_kit.prepare_kernels(self.device, self.config.model)
        # Otherwise `open_data` waits for the costs of all rows, when the model is built.
        if not is_measuring:
            super().start_data()

    def open_data(self) -> None:
        if self.config.eval.steps:
            self._eval_loader = self._loader("eval")  # its errors come now, not after hours
        super().open_data()
        if isinstance(self.feed.loader, PackLoader) and self.checkpoint is None:
            self._closing.enter_context(self.feed.loader.started())

    def prepare_dataloader(self, split: str) -> Any:
        return self.data.engine_loader(self, split)

    @cached_property
    def optim(self) -> OptimKit:
        return OptimKit(self.config.optim, self.config.seed)

    def build_optimizer(self, model: nn.Module) -> Any:
        if not self.has_data:
            with smaller_after_out_of_memory(self):
                model_kit.compile_blocks(self)
        return super().build_optimizer(model)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    def before_train(self) -> None:
        model_kit.export_link(self.config.export_link)
        if self.config.eval_harness is not None:
            self.harness.check(self.config.eval_harness.tasks)
        super().before_train()
        if self.data.new_rows is not None:
            model_kit.check_new_rows(self)
        self.mfu = MFUKit(self.model)

    def do_train(self) -> None:
        with smaller_after_out_of_memory(self):
            super().do_train()

    def train_pre_step(self, ctx: StepContext) -> None:
        row_checks.check_rows(self, ctx)  # on the host: on a GPU it would be a host sync
        self.mfu.count(ctx)
        row_checks.log_fill(ctx, self.config.data.tokens_per_pack, self.num_positions)

    def num_positions(self, batch: PackedBatch) -> int:
        """What a micro-batch holds of the budget of a pack."""
        return batch.num_tokens

    @cached_property
    def loss(self) -> Any:
        """The loss kit of `forward_step`: `(loss_sum, weight)` of a micro-batch."""
        return TokenNormedLossKit(self.config.loss)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        row_checks.refuse_preference_rows(micro_batch)
        log_sources = partial(self.data.log_sources, ctx, micro_batch)
        return self.loss(ctx, self.model, micro_batch, log_sources)

    @cached_property
    def generation(self) -> EvalGenerationKit:
        return EvalGenerationKit(self)

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        super().eval_step(ctx, micro_batch)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        self.generation.answer(ctx)

    def eval_tasks(self, ctx: StepContext) -> None:
        if self.config.eval_harness is not None:
            self.harness.evaluate_in(self, ctx)

    def evaluate_tasks(self) -> dict[str, float | None]:
        """The tasks of `eval_harness` alone, as a workflow on the checkpoint that `resume` names."""
        self.config = self.config.model_copy(update={"workflow": "evaluate"})  # the log's name
        self.before_evaluate()
        return self.harness.evaluate(self)

    @cached_property
    def harness(self) -> Any:
        """Evaluation harnesses. Only what runs their tasks imports them."""
        from mvp_engine.kit import harness

        return harness

    def generation_rows(self, micro_batch: PackedBatch) -> Tensor:
        """Which sequences of an evaluation get a generated answer: a mask. By default every n-th sample."""
        return self.generation.is_chosen(micro_batch)

    def after_generation(self, ctx: StepContext, completions: Completions) -> None:
        """Called before `score`, with the prompts of `self.answers` and the tokens that complete them."""

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> Verdicts | None:
        """Log metrics of the answers to prompts of one source; may return which are right, for the report page."""
        generation.log_exact_matches(ctx, name, answers)
        return None

    def keep_training(self, ctx: StepContext, what: str, can_continue: bool = True) -> Any:
        """An error inside is a warning if it happens in an evaluation of a training; `mvp check` raises it."""
        in_training = self._training and self.config.eval.steps is not None
        return generation.errors_as_warnings(self, ctx, what, in_training and can_continue)

    def after_train(self) -> None:
        super().after_train()
        examples.end_training(self, self.generation.gathered())

    def export(self) -> Path:
        """Write a Hugging Face folder of the current weights, or of their averages (EMA); adapters are merged."""
        return model_kit.export_folder(self)

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and write a page with curves, prompts, their media, and answers."""
        examples.write_report_of(self, lambda: self.generation.gathered())

    def write_page(self, figures: Any, answers: list[Answer], export: Path | None) -> None:
        """Write `report.html`; `figures` and `export` are those of the last evaluation and export, or None."""
        found = examples.examples_of(self.data, "eval", answers)
        examples.write_examples_page(self, figures, found, ", on held-out rows")

    def page_figures(self, figures: Mapping[str, float | None]) -> dict[str, str]:
        """Metrics as text for the report page, shares in percent, and the size of the model."""
        return examples.page_figures(self.model, figures)
