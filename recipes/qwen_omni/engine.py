"""A model that speaks: a Qwen3-Omni learns to answer in text and aloud.

Its *thinker* reads the question and writes the answer; its *talker* reads the text of the answer and speaks it, as
frames of codes of an audio codec: the first code of a frame from the talker itself, the others from a small *code
predictor*. All three train in one forward on packed rows.

Legend: T tokens. A *target position* is a token of text with a label, a frame of speech, or the end of speech.
"""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import MLLMEngine, MLLMModelKit, speech
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.generation import Completions
from mvp_engine.kit.row_checks import refuse_preference_rows
from mvp_engine.kit.speech.demo import word_errors

from .data import prepare
from .judge import Judge
from .settings import OmniConfig


class OmniEngine(MLLMEngine):
    config_class = OmniConfig
    config: OmniConfig
    title = "What a Qwen3-Omni says"

    # ---- Model: thinker and talker ---------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """`model.freeze` and `lora` choose what trains: often the talker alone, for a new voice or language."""
        return MLLMModelKit(self.config.lora).of_engine(self)

    @cached_property
    def trains_text(self) -> bool:
        """Without it no loss of text is computed, and no block of the thinker runs on rows without media."""
        return speech.trains_text(self.model)

    # ---- Data: rows with spoken answers, whose sounds are codes of `data.speech.codec` -----------

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        spoken = config.spoken
        if spoken is None:
            return super().make_processor(config)
        return prepare(spoken.folder, spoken.sentences, spoken.held_out)

    def prepare_dataloader(self, split: str) -> Any:
        """Packs of rows, and next to them the talker's positions, which loader workers plan."""
        return self.data.engine_loader(self, split)

    def num_positions(self, batch: PackedBatch) -> int:
        """What a pack holds of `data.pack_tokens`: tokens, and the talker's positions."""
        return speech.num_positions(batch)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over all target positions, and their number. Each counts once, whether text or speech."""
        refuse_preference_rows(micro_batch)
        settings = self.config.speech_loss
        ctx.count("tokens", micro_batch.num_tokens)
        names = ["speech_loss", *self.loss.outputs] if self.trains_text else ["speech_loss"]
        outputs = self.model(micro_batch, names)

        # Cross-entropy of codes, summed over frames: of the first codebook, and the mean over the others. The talker
        # also predicts where speech ends, in place of a first code.
        first, rest = outputs["speech_loss"].unbind()
        frames = speech.num_speech_frames(micro_batch)
        weight = speech.num_speech_labels(micro_batch)  # frames and ends of speech
        loss_sum = settings.weight * (first + settings.residual_weight * rest)
        ctx.log("speech_first", first.detach(), weight)
        ctx.log("speech_rest", rest.detach(), frames)
        ctx.count("frames", frames)
        if not self.trains_text:
            return loss_sum, weight

        # Cross-entropy of the text: -log p of each label.
        self.data.log_sources(ctx, micro_batch, -outputs["log_probs"].detach())
        loss_T = self.loss.per_token(outputs, micro_batch.labels)  # 0 without a label
        weight_T = self.loss.weights(micro_batch)  # 1 for a label, times the weight that the row gives it
        text = (loss_T * weight_T).sum()
        ctx.log("text_loss", text.detach(), weight_T.sum())
        return loss_sum + text, weight + weight_T.sum()

    # ---- Evaluation: write answers, speak them, listen -------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: PackedBatch) -> None:
        """The loss of held-out rows; some of them are kept, for answers to their prompts (`eval.generation`)."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)
        self.generation.add(ctx, micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        """The thinker completes the kept prompts, `after_generation` speaks the answers, `score` judges them."""
        self.generation.answer(ctx)

    @cached_property
    def player(self) -> speech.Player:
        """Plays codes: the vocoder of the model's folder, or else the codec of the data."""
        if self.config.model.path is not None:
            return speech.Player.of_folder(self.config.model.path)
        row_part: Any = self.data.row_encoder.row_part
        return speech.Player.of_codec(row_part.store.codec)

    def after_generation(self, ctx: StepContext, completions: Completions) -> None:
        """Speak the answers; an error is a warning while a training runs, and they are then answers in text alone."""
        self.answers = answers = [speech.SpokenAnswer(**vars(answer)) for answer in self.answers]
        generation = self.config.eval.generation
        settings = None if generation is None else generation.speech
        if settings is None:
            return
        with self.keep_training(ctx, "speech"):
            sounds = speech.speak_completions(self.model, completions, self.player, settings)
            self.answers = speech.save_answers(answers, sounds, self.run.dir / "speech" / f"step_{ctx.step}")
            ctx.log("speech_ended", sum(sound.ended for sound in sounds), len(sounds))

    @cached_property
    def judge(self) -> Judge:
        return Judge()

    def score(self, ctx: StepContext, name: str, answers: list[Any]) -> None:
        """Log the exact answers in text; of synthetic speech, also the share of words that the judge hears right."""
        super().score(ctx, name, answers)
        spoken = [answer for answer in answers if answer.speech]
        if self.config.spoken is None or not spoken:
            return
        soundfile = require_package("soundfile", "speech")
        num_words = 0
        num_errors = 0
        for answer in spoken:
            waveform, _ = soundfile.read(answer.speech, dtype="float32")
            expected = answer.expected.split()
            heard = self.judge.words(waveform, answer.speaker)
            num_words += len(expected)
            num_errors += word_errors(heard, expected)
        ctx.log(f"word_accuracy_{name}", num_words - num_errors, num_words)
