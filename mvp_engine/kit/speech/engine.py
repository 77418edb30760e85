"""SpeechEngine: an MLLMEngine whose model also speaks, and its loss: one sum and one weight of text and speech.

    class MyEngine(SpeechEngine):
        config_class = SpeechConfig

A *target position* is a token of text with a label, a frame of speech, or the end of speech. Each counts once in the
weight, so the loss is a mean over all target positions of all micro-batches and ranks, whatever their split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.generation import Answer, Prompt
from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.speech.generate import Player, speak_completions
from mvp_engine.kit.speech.omni_model import trains_text
from mvp_engine.kit.speech.rows import num_positions, num_speech_frames, num_speech_labels
from mvp_engine.kit.speech.settings import SpeechConfig, SpeechLoss


class SpeechLossKit:
    """The loss of a step of `model.type=omni_model`."""

    def __init__(
        self, settings: SpeechLoss | None = None, token_loss: TokenNormedLossKit | None = None
    ) -> None:
        """`token_loss`: of the text; None trains speech alone, and then no thinker block runs on rows of text."""
        self.settings = settings or SpeechLoss()
        self.token_loss = token_loss

    def __call__(
        self,
        ctx: StepContext,
        model: nn.Module,
        batch: PackedBatch,
        on_losses: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch, for a recipe to return from `forward_step`.

        `on_losses` is called with the plain loss of each token of text, without a gradient, for logging.
        """
        if "speech_loss" not in getattr(model, "provides", ()):
            raise UserError(
                f"the loss of speech needs model.type=omni_model: {type(model).__name__} does not speak"
            )
        ctx.count("tokens", batch.num_tokens)
        names = ["speech_loss"]
        if self.token_loss is not None:
            names += self.token_loss.outputs
        outputs = model(batch, names)
        first, rest = outputs["speech_loss"].unbind()
        weight = num_speech_labels(batch)
        ctx.log("speech_first", first.detach(), weight)
        ctx.log("speech_rest", rest.detach(), num_speech_frames(batch))
        ctx.count("frames", num_speech_frames(batch))
        loss = self.settings.weight * (first + self.settings.residual_weight * rest)
        if self.token_loss is None:
            return loss, weight
        if on_losses is not None:
            on_losses(-outputs["log_probs"].detach())
        weight_T = self.token_loss.weights(batch)
        text = (self.token_loss.per_token(outputs, batch.labels) * weight_T).sum()
        ctx.log("text_loss", text.detach(), weight_T.sum())
        return loss + text, weight + weight_T.sum()


@dataclass(frozen=True)
class SpokenAnswer(Answer):
    """An answer of an evaluation that the model has spoken."""

    speech: str = ""  # the file of the spoken answer
    speaker: str | None = None
    speech_ended: bool | None = None  # whether the model itself ended it

    def media_files(self) -> list[bytes]:
        file = Path(self.speech)
        return [file.read_bytes()] if self.speech and file.is_file() else []


class SpeechEngine(MLLMEngine):
    """An engine for `model.type=omni_model`: it learns spoken answers, and speaks in evaluations."""

    config_class: type[Config] = SpeechConfig
    config: SpeechConfig

    @cached_property
    def player(self) -> Player:
        """What plays codes: the vocoder of the model's folder; without one, the codec of `data.speech`."""
        if self.config.model.path is not None:
            return Player.of_folder(self.config.model.path)
        row_part: Any = self.data.row_encoder.row_part  # the config has a codec
        return Player.of_codec(row_part.store.codec)

    @cached_property
    def loss(self) -> SpeechLossKit:
        # Without text, no thinker block runs on rows of text.
        text = TokenNormedLossKit(self.config.loss) if trains_text(self.model) else None
        return SpeechLossKit(self.config.speech_loss, text)

    def num_positions(self, batch: PackedBatch) -> int:
        return num_positions(batch)

    def after_generation(
        self, ctx: StepContext, completions: Sequence[tuple[Prompt, list[int]]]
    ) -> None:
        """Speak the answers, and write their sounds into the run folder."""
        generation = self.config.eval.generation
        if generation is None:
            return
        answers = [SpokenAnswer(**vars(answer)) for answer in self.answers]
        self.answers = answers
        if generation.speech is None:
            return
        with self.keep_training(ctx, "speech"):
            row_part: Any = self.data.row_encoder.row_part  # the config is checked
            model: Any = self.model_engine.model
            sounds = speak_completions(
                model, completions, self.player, row_part.protocol, generation.speech
            )
            folder = self.run.dir / "speech" / f"step_{ctx.step}"
            spoken = []
            for answer, sound in zip(answers, sounds, strict=True):
                file = folder / f"{answer.source}_{answer.sample}.wav"
                sound.save(file)
                spoken.append(
                    replace(
                        answer,
                        speech=str(file),
                        speaker=sound.speaker,
                        speech_ended=sound.ended,
                    )
                )
            ctx.log("speech_ended", sum(sound.ended for sound in sounds), len(sounds))
            self.answers = spoken
