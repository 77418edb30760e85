"""The loss of Omni models: text, and speech by codebooks, as one sum and one weight.

A *target position* is a token of text with a label, a frame of speech, or the end of speech. Each counts once in the
weight, so the loss is a mean over all target positions of all micro-batches and ranks, whatever their split.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.context import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.settings import SpeechLoss
from mvp_engine.kit.speech.layout import num_speech_frames, num_speech_labels


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


def trains_text(model: nn.Module) -> bool:
    """Whether any parameter trains that the model's text depends on."""
    parts = parts_of(model)
    return any(p.requires_grad and parts[name] != "talker" for name, p in model.named_parameters())
