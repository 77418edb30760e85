"""Speech recognition: a Qwen2-Audio learns to transcribe audio, from random weights or from a folder of yours.

A sound and a prompt in, its transcript out: the encoder reads the sound, a projector makes tokens of it, the language
model writes the words. Legend: T tokens.
"""

from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMEngine, MLLMModelKit, check_rows
from mvp_engine.kit.row_checks import log_fill, refuse_preference_rows
from mvp_engine.kit.speech.demo import word_errors

from .data import prepare, words_of
from .settings import AudioConfig


class AudioEngine(MLLMEngine):
    config_class = AudioConfig
    config: AudioConfig
    title = "What a Qwen2-Audio hears"

    # ---- Model and data --------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Audio encoder, projector and language model; `model.freeze` and `lora` choose what trains."""
        return MLLMModelKit(self.config.lora).of_engine(self)

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        """With the section `speech`, sounds, rows and the processor are built once; otherwise they are yours."""
        speech = config.speech
        if speech is None:
            return super().make_processor(config)
        return prepare(speech.folder, speech.sentences, speech.held_out)

    def prepare_dataloader(self, split: str) -> Any:
        """Packs: rows side by side, without padding, up to `data.pack_tokens`. A sound counts its tokens."""
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        """Before the forwards, while the micro-batches are on the host: checks, FLOPs for the MFU, and metrics."""
        model: Any = self.model
        check_rows(self, ctx, model.check)
        self.mfu.count(ctx)
        log_fill(ctx, self.config.data.tokens_per_pack)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over the tokens of transcripts, and their number."""
        refuse_preference_rows(micro_batch)
        ctx.count("tokens", micro_batch.num_tokens)
        if self.loss.is_fused(self.model, micro_batch):
            # One pass over the logits computes the sum and its gradient. Without `loss.*` and token weights it is
            # the loss below; a loss of your own returns before these lines.
            outputs = self.model(micro_batch, ["loss", "losses"])
            self.data.log_sources(ctx, micro_batch, outputs["losses"])
            return outputs["loss"], micro_batch.num_loss_tokens
        outputs = self.model(micro_batch, self.loss.outputs)
        self.data.log_sources(ctx, micro_batch, -outputs["log_probs"].detach())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # -log p of the label, 0 without one
        weight_T = self.loss.weights(micro_batch)  # 1 for a label, times the weight that the row gives it
        self.loss.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    # ---- Evaluation ------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out sounds; some of them are kept, to be transcribed (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        """Transcribe the kept sounds, then call `score` for each source: known voices, and new ones."""
        self.generation.answer(ctx)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool]:
        """Log the word error rate: insertions, deletions and substitutions per word of the transcripts."""
        num_words = 0
        errors = list[int]()
        for answer in answers:
            expected = words_of(answer.expected)
            num_words += len(expected)
            errors.append(word_errors(words_of(answer.written), expected))
        ctx.log(f"wer_{name}", sum(errors), num_words)
        super().score(ctx, name, answers)
        return [error == 0 for error in errors]
