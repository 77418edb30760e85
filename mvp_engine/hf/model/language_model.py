"""LanguageModel: a causal (or multimodal) LM on packed batches, without full logits in memory.

The head is not transformers' forward: `ops.linear_cross_entropy` computes log-probs from hidden
states and the output embedding, in chunks of tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine import plugins
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.auto_model import (
    check_inputs,
    check_token_range,
    from_auto,
    generating_class,
)
from mvp_engine.hf.model.config_source import placeholder_tokens
from mvp_engine.hf.model.packed_model import Outputs, PackedModel, losses_of
from mvp_engine.hf.weights.export import Target, WholeFolder
from mvp_engine.ops.linear_cross_entropy import (
    linear_argmax,
    linear_log_probs,
    linear_logits,
    linear_loss,
)

if TYPE_CHECKING:
    from mvp_engine.distributed.sequence_parallel import UlyssesShard
    from mvp_engine.hf.model.kv_cache import KVCache

OF_LABELS = frozenset(("log_probs", "label_entropy", "loss", "losses"))  # 0 without a label
MOST_LABELS = 0.9  # share of tokens with a label above which the head runs on all tokens


class LanguageModel(PackedModel):
    """A language model; its outputs are per token and float32.

    - `log_probs`: of the labels; 0 where the label is ignored
    - `entropy`, `log_z`, `mean_log_probs`: of the distribution over the vocabulary
    - `label_entropy`: the entropy where there is a label; 0 elsewhere
    - `next_tokens`: the argmax, which is what greedy decoding writes after each position; never a
      placeholder of media, since no features would follow it
    - `next_logits`: logits of the token after each sequence, (S, V), to sample from; asked for alone
    - `loss`: minus the sum of log_probs, one scalar. Asked for alone (or with `losses`, its terms
      without gradient), it is cheaper: the gradients are computed in the forward

    Where all that is asked for concerns labels, the head runs on the tokens with a label alone: of a prompt it computes
    no logits.

    With `temperature` in the call, all are of the distribution that generation samples from: logits
    divided by it, and no placeholders. Otherwise of all tokens, at the model's own temperature.
    """

    model_type = "language_model"
    provides: tuple[str, ...] = (
        "log_probs",
        "entropy",
        "label_entropy",
        "log_z",
        "mean_log_probs",
        "next_tokens",
        "next_logits",
        "hidden_states",
        "loss",
        "losses",
    )

    def __init__(self, causal_lm: Any, temperature: float = 1.0, chunk: int = 2048) -> None:
        check_inputs(causal_lm)
        has_backbone = causal_lm.base_model is not causal_lm
        if not has_backbone:
            open_head(causal_lm)
        super().__init__(causal_lm)
        self.has_backbone = has_backbone
        self._before_head = self._name_before_head()
        self.temperature = temperature
        self._excluded: tuple[int, ...] = ()  # tokens of probability 0 in this forward
        self._num_labels: int | None = None  # in this forward; None: not known on the host
        self.chunk = chunk  # tokens per chunk of logits
        self._added: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {}
        steps = measure_logit_steps(causal_lm) or config_logit_steps(causal_lm.config)
        self.scale = steps.scale
        self.softcap = steps.softcap

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> LanguageModel:
        from transformers import AutoModelForMultimodalLM

        if getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"{config.model_type} is an encoder-decoder model; "
                "only decoder-only language models are supported"
            )
        if config.model_type.endswith("_assistant") and hasattr(config, "backbone_hidden_size"):
            raise UserError(
                f"{config.model_type} drafts tokens for another model and reads that model's keys and values; "
                "only models that run by themselves are supported"
            )
        if config.model_type in plugins.without_text():
            model_type = plugins.folder_type(config)
            raise UserError(f"{config.model_type} writes no text: set model.type={model_type}")
        if hasattr(config, "thinker_config"):
            model = cls(from_auto(AutoModelForMultimodalLM, config.thinker_config), **options)
            model.whole = WholeFolder(config, {"hf.": "thinker."})
            return model
        return cls(from_auto(generating_class(config), config), **options)

    def add_output(self, name: str, compute: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
        """Provide one more output per token: `compute(hidden_TD, head)`, inside of the forward.

        `head` has the arguments of `linear_log_probs` for the output embedding, without labels. With
        sequence parallel the hidden states are those of this rank's tokens.
        """
        self._added[name] = compute
        self.provides = (*self.provides, name)

    def base(self) -> nn.Module:
        return self.hf.base_model  # type: ignore[return-value]

    def _hidden_of(self, out: Any) -> Tensor:
        return out.last_hidden_state if self.has_backbone else out.logits

    def hidden(
        self, batch: PackedBatch, shard: UlyssesShard | None = None, kv_cache: KVCache | None = None
    ) -> Tensor:
        """The inputs of the output embedding."""
        hidden_TD = super().hidden(batch, shard, kv_cache)
        return getattr(self.hf, self._before_head)(hidden_TD) if self._before_head else hidden_TD

    def _name_before_head(self) -> str:
        """The module that a text model has between its backbone and its output embedding (ModernBERT: dense, norm)."""
        if self.decoder() is not self.base() or not self.has_backbone:
            return ""
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        others = [
            (name, child)
            for name, child in self.hf.named_children()
            if child is not self.base() and head not in child.modules()
        ]
        if len(others) != 1 or not any(True for _ in others[0][1].parameters()):
            return ""
        name, child = others[0]
        return name if len(inspect.signature(child.forward).parameters) == 1 else ""

    def check(self, batch: PackedBatch) -> None:
        super().check(batch)
        check_token_range(batch, "labels", self.hf.get_output_embeddings())  # type: ignore[operator]

    def forward(
        self,
        batch: PackedBatch,
        outputs: Iterable[str],
        kv_cache: KVCache | None = None,
        temperature: float | None = None,
    ) -> Outputs:
        if temperature is None:
            return super().forward(batch, outputs, kv_cache)
        if temperature <= 0:
            raise UserError(f"temperature={temperature}: log-probs need a temperature above 0")
        own = self.temperature
        self.temperature = temperature
        self._excluded = tuple(self.placeholders)
        try:
            return super().forward(batch, outputs, kv_cache)
        finally:
            self.temperature = own
            self._excluded = ()

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: KVCache | None = None
    ) -> Outputs:
        if "next_logits" not in wanted:
            if self.sequence_groups is None and OF_LABELS.issuperset(wanted):
                labels_T = batch.host_labels
                self._num_labels = None if labels_T is None else int((labels_T != IGNORE).sum())
            try:
                return super()._compute(batch, wanted, kv_cache)
            finally:
                self._num_labels = None
        if len(wanted) > 1:
            raise UserError(
                "next_logits is per sequence, other outputs are per token: ask for it alone"
            )
        states = super()._compute(batch, ("hidden_states",), kv_cache)
        # Dummies that a model engine runs along have no next token.
        real = getattr(batch, "num_real_sequences", batch.num_sequences)
        last_S = batch.cu_seqlens[1 : real + 1].long() - 1
        return {"next_logits": self._next_logits(states["hidden_states"][last_S])}

    @property
    def placeholders(self) -> list[int]:
        """Tokens that stand for features of media. Generation must not write them: none would follow."""
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        return placeholder_tokens(self.hf.config, head.weight.shape[0])

    @property
    def completion_token_type(self) -> int:
        """The type of tokens that follow a prompt, in fields such as `token_type_ids`.

        1 where type 0 is the prompt, whose tokens attend to each other (PaliGemma); elsewhere 0, text.
        """
        config: Any = self.hf.config
        return int(getattr(config.get_text_config(), "use_bidirectional_attention", None) is True)

    def _next_logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits over the whole vocabulary."""
        weight_VD, bias_V, vocab_shard = self._local_head()
        options: dict[str, Any] = {"bias_V": bias_V, "scale": self.scale, "softcap": self.softcap}
        logits_SV = linear_logits(hidden_SD, weight_VD, **options, **vocab_shard)
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        return logits_SV[:, : head.weight.shape[0]]

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        # At least one: a dummy batch has no labels, and its loss needs a gradient.
        if self._num_labels and self._num_labels < MOST_LABELS * len(labels_T):
            has_label_T = labels_T != IGNORE
            rows_N = torch.nonzero_static(has_label_T, size=self._num_labels)[:, 0]
            of_rows = self._head_outputs(hidden_TD[rows_N], labels_T[rows_N], wanted)
            return {
                name: value.new_zeros(len(labels_T)).index_copy(0, rows_N, value)
                if value.ndim
                else value
                for name, value in of_rows.items()
            }
        return self._head_outputs(hidden_TD, labels_T, wanted)

    def _head_outputs(
        self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]
    ) -> Outputs:
        weight_VD, bias_V, vocab_shard = self._local_head()
        options: dict[str, Any] = {
            "bias_V": bias_V,
            "scale": self.scale,
            "softcap": self.softcap,
            "chunk": self.chunk,
        }
        computed = {"hidden_states": hidden_TD}
        if "next_tokens" in wanted:
            never = _local_rows(self.placeholders, weight_VD, vocab_shard)
            computed["next_tokens"] = linear_argmax(
                hidden_TD, weight_VD, **options, **vocab_shard, excluded=never
            )
        for name in self._added.keys() & set(wanted):
            head = {"weight_VD": weight_VD, **options, **vocab_shard}
            computed[name] = self._added[name](hidden_TD, head)
        options["temperature"] = self.temperature
        if self._excluded:
            options["excluded"] = _local_rows(self._excluded, weight_VD, vocab_shard)
        missing = set(wanted) - set(computed)
        if "loss" in missing and missing <= {"loss", "losses"} and not vocab_shard:
            loss, losses_T = linear_loss(hidden_TD, weight_VD, labels_T, **options)
            computed |= {"loss": loss, "losses": losses_T}
        elif missing:
            options["mean"] = "mean_log_probs" in wanted
            if options["mean"] and self._excluded:
                raise UserError("mean_log_probs is over all tokens: ask for it without temperature")
            computed |= linear_log_probs(
                hidden_TD, weight_VD, labels_T, **options, **vocab_shard
            )._asdict()
            computed |= losses_of(computed["log_probs"])
            computed["label_entropy"] = torch.where(labels_T == IGNORE, 0.0, computed["entropy"])
        return {name: computed[name] for name in wanted}

    def _local_head(self) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        """Weight and bias of the output embedding, and which slice of the vocabulary they are.

        The third value is empty, or the arguments `group` and `vocab_start` of tensor parallelism.
        """
        head: Any = self.hf.get_output_embeddings()  # type: ignore[operator]
        weight = head.weight
        bias = head.bias
        embedding: Any = self.hf.get_input_embeddings()  # type: ignore[operator]
        # Of a tied head, the embedding has the adapter.
        adapter = getattr(embedding if embedding.weight is weight else head, "lora_tokens", None)
        if not isinstance(weight, DTensor):
            return weight if adapter is None else adapter.add_to(weight), bias, {}
        mesh = weight.device_mesh
        vocab_size = weight.shape[0]
        rows_per_rank = -(-vocab_size // mesh.size())  # rounded up: the last rank may have fewer
        vocab_start = min(vocab_size, rows_per_rank * mesh.get_local_rank())
        vocab_shard = {"group": mesh.get_group(), "vocab_start": vocab_start}
        local = weight.to_local()
        if adapter is not None:
            local = adapter.add_to(local, vocab_start, mesh.get_group())
        return local, None if bias is None else bias.to_local(), vocab_shard

    def reference_log_probs(self, batch: PackedBatch) -> Tensor | None:
        with attention.eager_attention(self.hf.config), own_head(self.hf):
            logits = self.hf(batch.input_ids[None], use_cache=False).logits[0]
        log_probs_TV = logits.float().div(self.temperature).log_softmax(-1)
        of_labels = log_probs_TV[:-1].gather(-1, batch.labels[:-1, None])[:, 0]
        return torch.cat([of_labels, of_labels.new_zeros(1)])


def _local_rows(
    tokens: Iterable[int], weight_VD: Tensor, vocab_shard: dict[str, Any]
) -> tuple[int, ...]:
    """The rows of these tokens in this rank's slice of the vocabulary."""
    start = vocab_shard.get("vocab_start", 0)
    return tuple(token - start for token in tokens if 0 <= token - start < len(weight_VD))


# ValueModel: a scalar per token from a linear head on any backbone, as value functions need it.


class ValueModel(PackedModel):
    """A backbone with a linear head: `values`, one float32 per token."""

    model_type = "value_model"
    provides = ("values", "hidden_states")
    fresh = ("score.weight",)

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        hidden_size = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self._init_weights(self.score)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            nn.init.normal_(self.score.weight, std=0.02)

    @classmethod
    def from_config(cls, config: Any) -> ValueModel:
        from transformers import AutoModel

        return cls(from_auto(AutoModel, config))

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        """A sequence classifier with one label, if transformers has one; else backbone plus head."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

        config_class: Any = type(self.hf.config)
        if config_class not in CLASSIFIERS:
            use = 'values = hidden @ heads["score.weight"].T\n'
            return replace(super().export_target(dtype), use=use)
        skeleton = self._skeleton(CLASSIFIERS[config_class], num_labels=1)
        prefix = f"{skeleton.base_model_prefix}."
        names = {}
        for name in skeleton.state_dict():
            in_backbone = name.startswith(prefix)
            names[name] = f"hf.{name.removeprefix(prefix)}" if in_backbone else name
        folder = self.side_files or self.source
        return Target(skeleton, names, (), dtype or self.export_dtype, folder)

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        values_T = self.score(hidden_TD).float()[:, 0]
        computed = {"values": values_T, "hidden_states": hidden_TD}
        return {name: computed[name] for name in wanted}


# Heads of language models: what follows the output embedding, and forwards that end in logits only.
#
# Models of one text family differ here: Cohere2 multiplies its logits by `logit_scale`, Cohere2-Vision with the same
# text config does not. So the forward of the model's class is run with a stand-in for its backbone and no head, on a
# few known numbers. That needs no weights, so it works on the meta device.

SMALL = 2.0**-10  # a soft cap leaves it as it is
LARGE = 2.0**24  # and gives its own value for this


class LogitSteps(NamedTuple):
    """logits = softcap * tanh(scale * x / softcap), or scale * x without a soft cap."""

    scale: float
    softcap: float | None


def measure_logit_steps(causal_lm: nn.Module) -> LogitSteps | None:
    """The steps of a model whose head follows its backbone; None where its forward cannot be run in this way."""
    base: Any = causal_lm.base_model
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    if base is causal_lm or head is None:
        return None
    hidden = torch.tensor([SMALL, LARGE], dtype=torch.float64, device="cpu").view(1, 1, 2)
    stand_in = _HeadOnly(causal_lm, base, head, _BackboneOutput(hidden))
    input_ids = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    try:
        with torch.no_grad():
            forward: Any = type(causal_lm).forward
            logits = forward(stand_in, input_ids=input_ids, use_cache=False).logits
        at_small, at_large = logits.flatten().tolist()
    except Exception:  # noqa: BLE001 - a forward with further steps: the preflight compares its log-probs
        return None
    if not (math.isfinite(at_large) and at_small > 0):
        return None
    if math.isclose(at_large / LARGE, at_small / SMALL, rel_tol=1e-6):
        return LogitSteps(_rounded(at_small / SMALL), None)
    scale = at_large * math.atanh(at_small / at_large) / SMALL
    return LogitSteps(_rounded(scale), _rounded(at_large))


def config_logit_steps(config: Any) -> LogitSteps:
    """The steps by the names that text configs have for them, for forwards that cannot be probed."""
    text = config.get_text_config()
    # Gemma, RecurrentGemma and xLSTM each have a name of their own for it.
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    found = [getattr(text, name, None) for name in caps]
    softcap = next((cap for cap in found if cap is not None), None)
    # Cohere multiplies its logits, Granite divides them.
    multiplier = float(getattr(text, "logit_scale", None) or 1.0)
    divisor = float(getattr(text, "logits_scaling", None) or 1.0)
    return LogitSteps(multiplier / divisor, softcap)


def _rounded(value: float) -> float:
    """Without the rounding errors of the probe, which are below 1e-9 in float64; some heads compute in float32."""
    return float(f"{value:.7g}")


class _BackboneOutput(dict[str, Any]):
    """Hidden states as any output class of transformers holds them; all other fields are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else self.get(key)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class _HeadOnly:
    """Stands for a model in its own forward: the backbone returns known numbers, the head returns its input."""

    def __init__(self, model: Any, base: Any, head: Any, output: _BackboneOutput) -> None:
        self.__dict__.update(_model=model, _base=base, _head=head, _output=output)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if value is self._base:
            return lambda *args, **kwargs: self._output
        if value is self._head:
            return lambda hidden: hidden
        return value


# ---- Models whose backbone is no module of its own ---------------------------------------------


def open_head(causal_lm: nn.Module) -> None:
    """Let the head of one model instance return its input: the model's `logits` are then its hidden states.

    For models such as Llama 4 whose forward ends in logits, and whose hidden states no part of it returns.
    """
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(causal_lm).__name__} does not separate its backbone from its head, and names no linear "
            "output embedding: choose another model"
        )
    head.__dict__["forward"] = _identity


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


@contextmanager
def own_head(causal_lm: nn.Module) -> Iterator[None]:
    """The model with the head that `open_head` took away."""
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    opened = head.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if opened is not None:
            head.__dict__["forward"] = opened
