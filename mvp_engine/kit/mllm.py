"""The kits, wired: an engine for models that read rows of text, images, video and audio, and answer.

A recipe subclasses it and overrides what it changes, or wires the kits itself where it changes much:

    class MyEngine(MLLMEngine):
        def score(self, ctx, name, answers):
            ctx.log(f"accuracy_{name}", sum(one.right for one in answers), len(answers))
"""

from __future__ import annotations

import os
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import model_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvp_engine.config.schema import Config, Count, Section
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_symlink
from mvp_engine.hf.config_source import read_config
from mvp_engine.hf.lora import Lora
from mvp_engine.kit.data import MLLMData, MLLMDataKit, load_processor
from mvp_engine.kit.examples import examples_of
from mvp_engine.kit.generate import Answer, answer
from mvp_engine.kit.loss import TokenLoss, TokenNormedLossKit
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.optim import OptimKit, OptimSettings
from mvp_engine.log.report import write_report


class EvalGeneration(Section):
    """Held-out questions that are answered by generation, in every evaluation."""

    max_new_tokens: Count = 32
    every_n_samples: Count = 1  # of the held-out rows, each so many-th is asked
    prompt_tokens: Count = (
        16  # of a row that is text and no chat: so many are given, the model goes on from there
    )


class MLLMConfig(Config):
    optim: OptimSettings
    mllm: MLLMData
    processor: str | None = (
        None  # the folder of the model's processor or tokenizer; None: that of the model
    )
    lora: Lora | None = None  # None: the model's own weights train
    loss: TokenLoss = TokenLoss()
    eval_generation: EvalGeneration | None = None  # None: evaluations have losses and no answers
    export: str | None = (
        None  # where the Hugging Face folder of the newest finished run is to be found: a link to it
    )

    @model_validator(mode="after")
    def _one_global_batch(self) -> MLLMConfig:
        self.mllm.global_batch_packs(self.data.global_batch_size)  # raises if two keys set it
        return self


class MLLMEngine(Engine):
    config_class: type[Config] = MLLMConfig
    config: MLLMConfig
    title = "What the model answers"  # of the report

    # ---- Parts: each may be another -------------------------------------------------------------------------------

    @classmethod
    def make_processor(cls, config: MLLMConfig) -> Any:
        """The processor, or a tokenizer; a recipe that makes its data makes it here too."""
        folder = config.processor or config.model.path
        if folder is None:
            raise UserError(
                "no processor: set model.path to a model's folder, or processor to one that has it"
            )
        return load_processor(folder)

    @classmethod
    def data_kit(cls, config: MLLMConfig) -> MLLMDataKit:
        """Also what `mvp data inspect` and `mvp check` use."""
        about = read_config(config.model.path, config.model.config)
        processor = cls.make_processor(config)
        return MLLMDataKit(
            config.mllm, processor, model_config=about, num_workers=config.data.num_workers
        )

    @cached_property
    def data(self) -> MLLMDataKit:
        return self.data_kit(self.config)

    @cached_property
    def optim(self) -> OptimKit:
        return OptimKit(self.config.optim, self.config.seed)

    @cached_property
    def loss(self) -> TokenNormedLossKit:
        return TokenNormedLossKit(self.config.loss)

    @property
    def global_batch_size(self) -> int:
        """Packs in one optimizer step: `data.global_batch_size`, or `mllm.global_batch_tokens` in packs."""
        packs = self.config.mllm.global_batch_packs(self.config.data.global_batch_size)
        return super().global_batch_size if packs is None else packs

    @property
    def tokenizer(self) -> Any:
        return getattr(self.data.processor, "tokenizer", self.data.processor)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> None:
        """Log figures of the answers to a source's questions; by default, how many are right to the letter.

        How a text goes on is neither right nor wrong: a source of texts has no such figure.
        """
        if judged := [one for one in answers if not one.open]:
            ctx.log(f"exact_{name}", sum(one.right for one in judged), len(judged))

    # ---- Hooks ----------------------------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        model: Any = MLLMModelKit(self.config.lora).build(self.config.model, self.config.model.type)
        model.side_files = (
            self.run.dir / "processor"
        )  # with the limits of this training, into checkpoints and exports
        if self.world.is_main:
            self.data.save_processor(model.side_files, self.config.model.path)
        return model

    def prepare_optimizer(self, model: nn.Module) -> Optimizer:
        return self.optim.build_optimizer(model)

    def prepare_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        tokens = self.config.mllm.micro_batch_tokens * self.global_batch_size
        return self.optim.build_scheduler(optimizer, self.total_steps, tokens_per_step=tokens)

    def prepare_dataloader(self, split: str) -> Any:
        return self.data.engine_loader(self, split)

    def before_train(self) -> None:
        self._link()
        if (
            self.config.loop.eval_interval
        ):  # what is wrong with held-out rows is told before hours of training
            self._eval_loader = self._loader("eval")
        super().before_train()
        self.mfu = MFUKit(self.model)  # type: ignore[arg-type]

    def train_pre_step(self, ctx: StepContext) -> None:
        self.mfu.count(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        if "side" in micro_batch.sequence_fields:
            raise UserError(
                "mllm.pairs: this loss teaches rejected answers too. Set it to false, or write forward_step"
            )
        return self.loss(ctx, self.model, micro_batch, partial(self._log_sources, ctx, micro_batch))

    def after_train(self) -> None:
        super().after_train()
        if self.config.export is not None:
            self.export()

    def before_evaluate(self) -> None:
        super().before_evaluate()
        self.optim.load_averages(self.model_engine, self.checkpoint)

    def evaluate(self) -> dict[str, float | None]:
        self.asked: list[PackedBatch] = []
        with self.optim.averaged():
            return super().evaluate()

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        super().eval_step(ctx, micro_batch)
        if self.config.eval_generation and ctx.counts:
            chosen = (
                (
                    micro_batch.sequence_fields["sample"]
                    % self.config.eval_generation.every_n_samples
                    == 0
                )
                .nonzero()[:, 0]
                .tolist()
            )
            self.asked += (
                [micro_batch.select(chosen).to("cpu")] if chosen else []
            )  # pictures of a whole evaluation

    def eval_end(self, ctx: StepContext) -> None:
        settings = self.config.eval_generation
        if settings is None:
            return
        self.answers = answer(
            self.model_engine,
            self.asked,
            self.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            prompt_tokens=settings.prompt_tokens,
            stop=self.data.eos_token_ids,
            budget=self.config.mllm.micro_batch_tokens,
        )
        for i, name in enumerate(self.data.source_names("eval")):
            self.score(ctx, name, [one for one in self.answers if one.source == i])

    # ---- Workflows ------------------------------------------------------------------------------------------------

    def export(self) -> Path:
        """A Hugging Face folder of the model as it is now (of the averages, where they are kept), adapters merged."""
        link = self._link()
        if not self._training and not hasattr(self, "model_engine"):
            self.before_evaluate()
        folder = (
            self.run.dir / f"hf_step_{self.step}{'' if self.config.optim.ema is None else '_ema'}"
        )
        if not self.world.broadcast(folder.exists()):
            with self.optim.averaged():
                self.model_engine.export_hf(folder)
        if self.world.is_main and link is not None:
            link.parent.mkdir(parents=True, exist_ok=True)
            atomic_symlink(link, os.path.relpath(folder.resolve(), link.parent.resolve()))
        self.logger.info(
            "Hugging Face folder: %s%s", folder, f", also found as {link}" if link else ""
        )
        return folder

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and show curves, questions with their media, and answers on a page."""
        self._link()
        figures = self.evaluate()
        export = self.export()
        every = self.world.all_gather(
            self.answers if self.config.eval_generation and self.layout.is_mp_src_rank else []
        )
        if self.world.is_main:
            self.write_page(
                figures,
                sorted((one for part in every for one in part), key=lambda one: one.sample),
                export,
            )

    def write_page(
        self, figures: dict[str, float | None], answers: list[Answer], export: Path
    ) -> None:
        losses = {name: name for name in figures if name.startswith("loss")}
        others = {name: name for name in figures if name not in losses}
        shown = {
            name: "none" if value is None else f"{value:.4g}" for name, value in figures.items()
        }
        file = self.run.dir / "report.html"
        write_report(
            file,
            self.run,
            title=self.title,
            subtitle=f"{self.run.id}, step {self.step}, on held-out rows",
            figures=shown | {"parameters": f"{sum(p.numel() for p in self.model.parameters()):,}"},
            panels={"held-out loss": losses} | ({"held-out figures": others} if others else {}),
            examples=examples_of(self.data, "eval", answers),
            config=self.config.to_yaml(),
            next_steps={
                "Train on": f"mvp train {self.run.dir / 'config.yaml'} resume={self.run.dir} loop.total_steps=N",
                "Start from this model": f"model.path={export}",
                "Compare runs": "mvp runs list",
            },
        )
        self.logger.info("report: %s", file)

    def _log_sources(self, ctx: StepContext, micro_batch: PackedBatch, loss_T: Tensor) -> None:
        if len(self.data.source_names(ctx.split)) > 1:  # of one source it is the loss itself
            for name, figures in self.data.source_losses(-loss_T, micro_batch, ctx.split).items():
                ctx.log(name, *figures)

    def _link(self) -> Path | None:
        if self.config.export is None:
            return None
        link = Path(self.config.export).expanduser()
        if link.exists() and not link.is_symlink():
            raise UserError(
                f"export={link} is there, and no link of an earlier run: set export to another place"
            )
        there = next(folder for folder in link.absolute().parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(
                f"export={link}: nothing can be written into {there}. Set export to another place"
            )
        return link
