"""What the transformer blocks of a model save for backward, and what activation checkpointing and FP8 change.

Everything is counted on the meta device, from the layers of each block and the number of rows (tokens or
patches) that they process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.actions.action_model import ActionModel
from mvp_engine.hf.actions.pi0 import Pi0Policy
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.media.shared_media import largest_share
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.action_flops import language_backbone, num_suffix_rows
from mvp_engine.kit.estimate.settings import EstimateSettings, runs_fp8_experts
from mvp_engine.kit.flop_costs import matmul_flops, modules_in_forward_order
from mvp_engine.kit.mfu import MFUKit, ids_with_own_media
from mvp_engine.kit.speech.csm import CsmModel
from mvp_engine.kit.speech.flops import SPEAKING, thinker_share
from mvp_engine.kit.speech.omni_model import OmniModel
from mvp_engine.kit.speech.rows import SPEECH
from mvp_engine.ops import fp8
from mvp_engine.ops.cudnn_attention import LARGEST_HEAD  # also FlashAttention's
from mvp_engine.ops.nf4 import quantized_layers

REPEATING_ALL = ("full", "offload")  # modes with a second forward of the block
REPEATING = ("attention", *REPEATING_ALL)  # and of the block without its attention
# Inputs of blocks that are on the GPU at a time with `offload`: of the block that runs, and its neighbours'.
RESIDENT_INPUTS = 3
# Uncompiled blocks save this many times more: each operation keeps its own inputs.
EAGER = 1.7

# The kind of rows that the layers of a part process; all other parts are encoders.
ROWS_OF_PART = {"llm": "text", "projector": "projector", "action": "action", "talker": "talker"}


@dataclass(frozen=True)
class Block:
    module: nn.Module
    part: str
    in_backward: bool  # it trains, or something before it does
    is_predictor: bool = False  # of codes, which belongs to the talker
    keeps_attention: bool = True  # with activation checkpointing `attention`

    @property
    def rows(self) -> str:
        return "code" if self.is_predictor else ROWS_OF_PART.get(self.part, "encoder")

    @property
    def is_text(self) -> bool:
        return self.rows in ("text", "action", "talker", "code")

    @cached_property  # asked for every pack size
    def elements(self) -> SavedElements:
        return saved_elements(self.module)


@dataclass
class Amount:
    """An amount of text blocks and one of encoder blocks: ranks shard the text model only."""

    text: float = 0.0
    encoder: float = 0.0

    def add(self, block: Block, value: float) -> None:
        if block.is_text:
            self.text += value
        else:
            self.encoder += value


class BlockCosts:
    """The blocks of a model with the settings of their parts."""

    def __init__(self, model: PackedModel, settings: EstimateSettings) -> None:
        self.model = model
        self.settings = settings
        self.mfu = MFUKit(model)
        self.blocks = _blocks(model)
        checkpointing = settings.activation_checkpointing
        self.checkpointing = by_part(model, checkpointing, "model.activation_checkpointing")
        self.compiled = by_part(model, settings.compile, "model.compile")
        self.fp8 = by_part(model, settings.fp8, "model.fp8")
        # What only text outputs use gets no gradient from actions, and so no optimizer state.
        unused = set[str]()
        if isinstance(model, ActionModel) and not settings.text_loss:
            unused = model.text_parameters
        self.unused = {p for name, p in model.named_parameters() if name in unused}

    def trained(self) -> list[nn.Parameter]:
        """The parameters that get gradients and optimizer states."""
        return [p for p in self.model.parameters() if p.requires_grad and p not in self.unused]

    def mode(self, block: Block) -> str:
        """The mode of activation checkpointing of a block; `full` in place of `attention` where that keeps nothing."""
        mode = self.checkpointing.get(block.part, "none")
        if mode == "attention" and not self.keeps_attention(block):
            return "full"
        return mode

    def keeps_attention(self, block: Block) -> bool:
        """Whether the mode `attention` keeps something; in fp32, compiled blocks break their graphs at attention."""
        is_fp32_compiled = not self.settings.half_precision and self.compiled.get(block.part)
        return block.keeps_attention and not is_fp32_compiled

    def repeats_attention(self, block: Block) -> bool:
        """Whether backward computes a block's attention a second time."""
        mode = self.mode(block)
        is_mixer = not block.elements.attention
        if self.checkpointing.get(block.part) == "attention" and is_mixer:
            return False  # of a hybrid model
        return block.in_backward and mode in REPEATING_ALL

    def saved_bytes(self, batch: PackedBatch, *, checkpointed: bool = True) -> Amount:
        """Bytes that all blocks save for backward; `checkpointed=False` ignores activation checkpointing.

        Not the inputs of blocks that are on the host.
        """
        amount = Amount()
        for block, mode, size in self._saved(batch, checkpointed):
            if mode != "offload":
                amount.add(block, size)
        return amount

    def offloaded_bytes(self, batch: PackedBatch) -> list[float]:
        """Bytes of the inputs of blocks that wait on the host for backward, the largest first."""
        if "offload" not in self.checkpointing.values():
            return []
        found = [size for _, mode, size in self._saved(batch) if mode == "offload"]
        return sorted(found, reverse=True)

    def block_bytes(self, batch: PackedBatch) -> float:
        """Bytes of the one block that backward computes again, and of inputs on their way to and from the host.

        This memory is in use until backward ends.
        """
        if {"none"}.issuperset(self.checkpointing.values()):
            return 0.0
        pairs = zip(self._saved(batch, False), self._saved(batch), strict=True)
        again = max((whole - kept for (_, _, whole), (_, _, kept) in pairs), default=0.0)
        return max(0.0, again) + sum(self.offloaded_bytes(batch)[:RESIDENT_INPUTS])

    def _saved(
        self, batch: PackedBatch, checkpointed: bool = True
    ) -> Iterator[tuple[Block, str, float]]:
        """Blocks in backward with their modes, and the bytes that they save."""
        rows = self._rows(batch)
        tokens = rows["text"]
        for kind in {"text", "talker", "code"} & rows.keys():
            rows[kind] /= self.settings.sequence_ranks
        size = self.settings.compute_bytes
        share = self.encoder_share(batch)
        for block in self.blocks:
            if not block.in_backward:
                continue
            mode = self.mode(block) if checkpointed else "none"
            elements = block.elements
            if self.unused and self.unused.intersection(block.module.parameters()):
                elements = saved_for_keys(block.module)
            # The input of a block, which full checkpointing saves, is whole on each tensor parallel rank.
            ranks = self.settings.tensor if block.is_text else 1
            per_row = size * elements.full
            if mode == "none":
                eager = 1.0 if self.compiled.get(block.part) else EAGER
                per_row = size * elements.none * eager / ranks
                if self._compiles_fp8_gradients(block):
                    per_row -= elements.fp8_gradients
            elif mode == "selective":
                per_row = size * elements.selective / ranks
            elif mode == "attention":  # and its log-sum-exp, in float32
                per_row += (size * elements.attention + 4 * elements.heads) / ranks
            saved = per_row * rows.get(block.rows, 0.0)
            saved *= 1.0 if block.is_text else share
            if mode == "none" and block.is_text and self.settings.context > 1:
                saved += size * self._gathered_elements() * tokens
            yield block, mode, saved

    def encoder_share(self, batch: PackedBatch) -> float:
        """The part of the encoders' work of the sequence parallel rank that has most of it."""
        inputs = {name: media for name, media in batch.media.items() if name != SPEECH}
        rows = {name: len(media.values) for name, media in inputs.items()}
        ranks = self.settings.sequence_ranks
        largest = sum(rows[name] * largest_share(media, ranks) for name, media in inputs.items())
        return largest / max(1, sum(rows.values()))

    def _gathered_elements(self) -> float:
        """Elements of gathered keys and values that a layer saves for each token of the whole batch."""
        config: Any = self.model.hf.config.get_text_config()  # type: ignore[union-attr, operator]
        heads, kv_heads = num_heads(config)
        if not heads:
            return 0.0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        # A sequence with two chunks on a rank has its keys up to the end of the first one twice.
        copies = 1 + 1 / (2 * self.settings.context)
        ranks = self.settings.ulysses * self.settings.tensor
        return 2 * head_dim * max(1.0, kv_heads / ranks) * copies

    def repeated_flops(self, batch: PackedBatch) -> Amount:
        """GEMM FLOPs of the second forward of checkpointed blocks."""
        rows = self._rows(batch)
        amount = Amount()
        for block in self.blocks:
            if block.in_backward and self.mode(block) in REPEATING:
                flops = _gemm_flops(block.module.modules(), self._config_of(block))
                amount.add(block, flops * rows.get(block.rows, 0.0))
        return amount

    def _config_of(self, block: Block) -> Any:
        """The config that has the number of experts of a row."""
        if block.rows == "talker" and isinstance(self.model, OmniModel):
            talker: Any = self.model.talker
            return talker.config.text_config
        backbone: Any = language_backbone(self.model)
        return backbone.config.get_text_config() if block.is_text else None

    def fp8_flops(self, batch: PackedBatch) -> Amount:
        """FLOPs of FP8 GEMMs: the outputs of linear layers and experts, and the gradients of their inputs."""
        rows = self._rows(batch)
        amount = Amount()
        for block in self.blocks:
            if not self.fp8.get(block.part, False):
                continue
            backward = 0
            if block.in_backward:
                backward = 2 if self.mode(block) in REPEATING else 1
            flops = _gemm_flops(self._fp8_modules(block), self._config_of(block))
            amount.add(block, (1 + backward) * flops * rows.get(block.rows, 0.0))
        return amount

    def fp8_weight_gradient_flops(self, batch: PackedBatch) -> Amount:
        """FLOPs of weight gradients that are FP8 GEMMs: those of linear layers."""
        rows = self._rows(batch)
        amount = Amount()
        for block in self.blocks:
            if self.settings.fp8_weight_gradients and self.fp8.get(block.part, False):
                layers = [module for module in self._fp8_modules(block) if fp8.fits(module)]
                params = [p for layer in layers for p in layer.parameters(False)]
                trained = [p for p in params if p.requires_grad and p not in self.unused]
                weights = sum(p.numel() for p in trained)
                amount.add(block, 2.0 * weights * rows.get(block.rows, 0.0))
        return amount

    def _compiles_fp8_gradients(self, block: Block) -> bool:
        is_fp8 = self.settings.fp8_weight_gradients and self.fp8.get(block.part, False)
        return bool(is_fp8 and self.compiled.get(block.part))

    def _fp8_modules(self, block: Block) -> list[nn.Module]:
        """The linear layers and stacked experts of a block that run in FP8."""
        if not self.fp8.get(block.part, False):
            return []
        layers = moe_layers.fp8_layers(block.module)
        if not runs_fp8_experts(self.settings.gpu):
            return layers
        stacked = moe_layers.modules(block.module).values()
        return [*layers, *(module for module in stacked if moe_layers.fit_fp8(module))]

    def gathered_in_fp8(self) -> set[nn.Parameter]:
        """The weights that FSDP gathers as float8 values: `hf/experts/fp8_layers.py`."""
        found = set[nn.Parameter]()
        for block in self.blocks:
            layers = [one for one in self._fp8_modules(block) if isinstance(one, nn.Linear)]
            params = [layer.get_parameter("weight") for layer in layers]
            found.update(p for p in params if len(p) % self.settings.fsdp_ranks == 0)
        return found

    def dequantized_bytes(self) -> float:
        """Bytes that dequantizing the weights of blocks moves in a forward and backward: 4.5 bits in, a number out."""
        moved = 0.0
        for block in self.blocks:
            passes = 1 + block.in_backward
            passes += block.in_backward and self.mode(block) in REPEATING
            layers = quantized_layers(block.module).values()
            weights = sum(layer.in_features * layer.out_features for layer in layers)
            moved += passes * weights * (9 / 16 + self.settings.compute_bytes)
        return moved

    def autocast_bytes(self) -> float:
        """Bytes of the low-precision weight copies that autocast saves for backward.

        Checkpointed blocks cast again in backward, and weights that are bf16 already need no copy. Compiled FP8 layers
        save the one that backward needs.
        """
        if not self.settings.half_precision:
            return 0.0
        total = 0.0
        for block in self.blocks:
            if not block.in_backward or self.mode(block) != "none":
                continue
            low = {p for module in self._fp8_modules(block) for p in module.parameters(False)}
            for param in block.module.parameters():
                if param in self.unused or param.element_size() <= 2:
                    continue
                if param not in low:
                    total += 2.0 * param.numel()
                elif self.compiled.get(block.part):
                    total += param.numel()
        return total

    def _rows(self, batch: PackedBatch) -> dict[str, float]:
        """The number of rows that the layers of each kind process."""
        suffix = float(num_suffix_rows(self.model, batch))
        text = batch.num_tokens * thinker_share(self.model, batch)
        rows = {"text": float(text), "action": suffix}
        if not isinstance(self.model, Pi0Policy):  # a chunk regressor has no blocks of its own
            rows["text"] += suffix
        for name, media in batch.media.items():
            if not len(media.row_counts):
                continue
            ids = ids_with_own_media(batch, media)
            for kind, count, pair in self.mfu.encoder_work(name, media, ids):
                if pair is None:
                    rows[kind] = rows.get(kind, 0.0) + float(count)
        return rows


def _blocks(model: PackedModel) -> list[Block]:
    after_trained = set[nn.Module]()
    has_trained = False
    ordered = (
        [] if isinstance(model, CsmModel) else modules_in_forward_order(language_backbone(model))
    )
    for module, _, _ in ordered:
        if has_trained:
            after_trained.add(module)
        has_trained = has_trained or _trains(module, recurse=False)
    found = []
    predictor = set[nn.Module]()
    if isinstance(model, SPEAKING):
        predictor = set(model.predictor.modules())
    speaks = isinstance(model, SPEAKING) and _trains(model)  # the talker comes after everything
    # Action models attend by groups of queries, without masks.
    within_images = not isinstance(model, ActionModel) and attends_within_images(model)
    for module, part in blocks_by_part(model):
        in_backward = module in after_trained or _trains(module) or (speaks and part == "talker")
        keeps = has_fused_attention(module) and not (part == "llm" and within_images)
        found.append(Block(module, part, in_backward, module in predictor, keeps))
    return found


def _trains(module: nn.Module, recurse: bool = True) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=recurse))


def _gemm_flops(modules: Iterable[nn.Module], config: Any) -> float:
    """Forward FLOPs of the GEMMs of modules, without those of their children, for one row."""
    flops = 0.0
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            flops += matmul_flops(module, name, param, config)
    return flops


# SavedElements: what one transformer block saves for backward, per row, counted from its layers.

HEAD_DIM = 64  # of attention that does not name it


@dataclass
class SavedElements:
    """Elements per row that backward of a block needs, by mode of activation checkpointing."""

    none: float = 0.0
    selective: float = 0.0  # outputs of GEMMs and attention
    full: float = 0.0  # the input of the block
    attention: float = 0.0  # the output of attention
    heads: float = 0.0  # of attention
    fp8_gradients: float = 0.0  # bytes less with `model.fp8_weight_gradients`, in compiled blocks


def saved_elements(block: nn.Module) -> SavedElements:
    """Count the elements over the groups of a block: attention, MLP, experts, norms.

    A group of linear layers saves the input and the outputs of its first layers and the input of its last one.
    Rotary embeddings create new queries and keys. A norm saves its input. LoRA saves little besides the input of
    its layer, which is counted already.
    """
    saved = SavedElements()
    for group in block.children():
        linear = _linear_layers(group)
        experts = [p for p in group.parameters() if p.ndim == 3]
        if linear:
            _add_linear(saved, group, linear)
        if experts:
            _add_experts(saved, experts, _experts_per_token(group))
        if not linear and not experts:
            for name, param in group.named_parameters():
                if name.endswith("weight") and param.ndim == 1:  # of a norm
                    saved.none += param.numel()
    saved.selective += saved.full
    return saved


def saved_for_keys(block: Any) -> SavedElements:
    """Of a block that only computes keys and values: the inputs of its norm and projections, and the rotated keys."""
    width = float(block.self_attn.k_proj.in_features)
    keys = float(block.self_attn.k_proj.out_features)
    return SavedElements(2 * width + 2 * keys, width + 2 * keys, width)


def _linear_layers(group: nn.Module) -> list[nn.Linear]:
    layers = []
    for name, module in group.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            layers.append(module)
    return layers


def _add_linear(saved: SavedElements, group: nn.Module, layers: list[nn.Linear]) -> None:
    *first, last = layers
    last_input = float(last.in_features)
    outputs = float(sum(layer.out_features for layer in first))
    first_input = max((layer.in_features for layer in first), default=0.0)
    saved.none += last_input + outputs + first_input
    saved.selective += outputs + last.out_features
    saved.full = max(saved.full, float(last.out_features))
    is_attention = hasattr(group, "is_causal") and bool(first)
    if is_attention:  # queries are as wide as the attention output, the last layer's input
        saved.none += last_input + (outputs - last_input) / 2
        saved.selective += last_input
        saved.attention += last_input
        saved.heads += last_input / (getattr(group, "head_dim", None) or HEAD_DIM)
    # One byte of an input instead of two. Backward of attention needs its output in bf16 all the same.
    if any(_has_fp8_gradient(layer) for layer in first):
        saved.fp8_gradients += first_input
    if _has_fp8_gradient(last):
        saved.fp8_gradients += -last_input if is_attention else last_input


def _has_fp8_gradient(layer: nn.Linear) -> bool:
    return fp8.fits(layer) and layer.weight.requires_grad


def _add_experts(saved: SavedElements, weights: list[nn.Parameter], per_token: int) -> None:
    saved.none += per_token * sum(float(weight.shape[1] + weight.shape[2]) for weight in weights)
    saved.selective += per_token * sum(float(weight.shape[1]) for weight in weights)


def _experts_per_token(group: nn.Module) -> int:
    for module in group.modules():
        for name in ("top_k", "num_experts_per_tok"):
            found = getattr(module, name, None)
            if isinstance(found, int):
                return found
    return 1


# ---- Attention that is no operator ----------------------------------------------------------------------------------


def has_fused_attention(block: nn.Module) -> bool:
    """Whether the layers of a block let a GPU compute attention by cuDNN or FlashAttention.

    They are operators, whose outputs the mode `attention` keeps. FlexAttention (soft caps, sinks, other head sizes),
    the reference loop (dropout) and mixers of hybrid models are none: there `attention` is `full`.
    """
    return any(hasattr(layer, "is_causal") and _is_fused(layer) for layer in block.modules())


def _is_fused(attention: Any) -> bool:
    softcap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    dropout: Any = getattr(attention, "attention_dropout", None)
    if softcap is not None or sinks is not None or dropout:
        return False
    size = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    head_dim = int(size or HEAD_DIM)
    same_values = getattr(attention, "v_head_dim", head_dim) == head_dim
    return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and same_values


def attends_within_images(model: PackedModel) -> bool:
    """Whether tokens of an image attend to each other in the language model, by FlexAttention (Gemma 3, PaliGemma)."""
    hf: Any = model.hf
    text: Any = hf.config.get_text_config()
    has_types = "token_type_ids" in inspect.signature(hf.forward).parameters
    return has_types or bool(getattr(text, "use_bidirectional_attention", False))
