"""A Hugging Face language model on packed batches: log-probabilities of the labels without full logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import attention
from mvp_engine.hf.packed_model import (
    Outputs,
    PackedModel,
    check_token_range,
    from_auto,
    losses_of,
)
from mvp_engine.ops.linear_cross_entropy import linear_argmax, linear_log_probs, linear_loss


class LanguageModel(PackedModel):
    """Log-probs of the labels (0 where there is none), entropy and more of the distribution, per token, in float32.

    `next_tokens` are the most likely ones: what greedy decoding writes behind each position. `loss` is minus the sum of
    the log-probs as one number, and quicker.
    """

    model_type = "language_model"
    provides = (
        "log_probs",
        "entropy",
        "log_z",
        "mean_log_probs",
        "next_tokens",
        "hidden_states",
        "loss",
        "losses",
    )

    def __init__(self, causal_lm: Any, temperature: float = 1.0, chunk: int = 2048) -> None:
        if causal_lm.base_model is causal_lm:
            raise UserError(
                f"{type(causal_lm).__name__} has no backbone apart from its head, as a language model must"
            )
        super().__init__(causal_lm)
        config = causal_lm.config.get_text_config()
        self.temperature, self.chunk = temperature, chunk
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Granite divides its logits, Cohere multiplies them.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> LanguageModel:
        from transformers import (
            MODEL_FOR_MULTIMODAL_LM_MAPPING,
            AutoModelForCausalLM,
            AutoModelForMultimodalLM,
        )

        multimodal = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"{config.model_type} is an encoder with a decoder, not a language model on one sequence"
            )
        auto = AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM
        return cls(from_auto(auto, config), **options)

    def base(self) -> nn.Module:
        return self.hf.base_model  # type: ignore[return-value]

    def check(self, batch: PackedBatch) -> None:
        super().check(batch)
        check_token_range(batch, "labels", self.hf.get_output_embeddings())  # type: ignore[operator]

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        weight, bias = head.weight, head.bias
        shared: dict[str, Any] = {}
        if isinstance(weight, DTensor):  # each rank has a slice of the vocabulary
            rows, ranks = weight.shape[0], weight.device_mesh.size()
            start = min(rows, -(-rows // ranks) * weight.device_mesh.get_local_rank())
            shared = {"group": weight.device_mesh.get_group(), "vocab_start": start}
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        how: dict[str, Any] = {
            "bias_V": bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "chunk": self.chunk,
        }
        every = {"hidden_states": hidden_TD}
        if "next_tokens" in wanted:
            every["next_tokens"] = linear_argmax(hidden_TD, weight, **how, **shared)
        how["temperature"] = self.temperature
        missing = set(wanted) - set(every)
        if "loss" in missing <= {"loss", "losses"} and not shared:
            every["loss"], every["losses"] = linear_loss(hidden_TD, weight, labels_T, **how)
        elif missing:
            how["mean"] = "mean_log_probs" in wanted
            every |= linear_log_probs(hidden_TD, weight, labels_T, **how, **shared)._asdict()
            every |= losses_of(every["log_probs"])
        return {name: every[name] for name in wanted}

    def own_log_probs(self, batch: PackedBatch) -> Tensor | None:
        with attention.own_attention(self.hf.config):
            logits = self.hf(batch.input_ids[None], use_cache=False).logits[0]
        picked = (
            logits.float()
            .div(self.temperature)
            .log_softmax(-1)[:-1]
            .gather(-1, batch.labels[:-1, None])[:, 0]
        )
        return torch.cat([picked, picked.new_zeros(1)])
