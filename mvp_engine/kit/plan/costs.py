"""BlockCosts: what the transformer blocks of a model save for backward and compute, with the settings of a training.

Everything is counted on the meta device, from the layers of each block and the number of rows (tokens or patches) that
they process, by the rules of compiled blocks on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.lora.quantize import quantize_layers
from mvp_engine.hf.media.shared_media import largest_share
from mvp_engine.hf.model.adapter import cast_frozen_base
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.flop_costs import PlanFacts, matmul_flops, modules_in_forward_order
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.imports import load_spec
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.plan.hardware import gpu_by_name
from mvp_engine.model_engine import Settings
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.ops import fp8
from mvp_engine.ops.cudnn_attention import LARGEST_HEAD  # also FlashAttention's
from mvp_engine.ops.nf4 import quantized_layers

REPEATING_ALL = ("full", "offload")  # modes with a second forward of the block
REPEATING = ("attention", *REPEATING_ALL)  # and of the block without its attention
# Inputs of blocks that are on the GPU at a time with `offload`: of the block that runs, and its neighbours'.
RESIDENT_INPUTS = 3
# Uncompiled blocks save this many times more: each operation keeps its own inputs.
EAGER = 1.7
HEAD_DIM = 64  # of attention that does not name it
FP8_SPEEDUP = 1.45  # of an FP8 GEMM, including the quantization of its operands
# Of one for a weight gradient, whose operands are transposed: 2.8 and 0.8 ms, instead of 4.2, for a layer of Qwen3-1.7B
# and 32k tokens.
FP8_WEIGHT_GRADIENT_SPEEDUP = 1.2


@dataclass(frozen=True)
class PlanSettings(Settings):
    """The settings of a model engine, and what else memory and time depend on apart from the model and its batches."""

    precision: str = "bf16"
    compile: Any = "auto"
    gpu: str = "H200"
    state_dtype: str = "float32"
    offload_states: bool = False  # optimizer states are on the host (optim.offload)
    reference_copy: bool = False  # a second, frozen model, as preference training has it
    teachers: tuple[str, ...] = ()  # frozen models of other sizes, as distillation has them
    shard: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    reshard: bool = True
    recipe: Any = None  # the whole config, for the facts of its model

    @classmethod
    def of(cls, config: Any, parallel: Any, gpu: str) -> PlanSettings:
        """`parallel`: the section of the layout, which in an RL config is that of the actor.

        Pipeline stages count as shards: a rank holds as many weights.
        """
        precision = config.train.precision
        layout = ("ulysses", "context", "tensor", "expert", "reshard")
        return cls.from_config(
            config,
            "bf16" if precision == "auto" else precision,
            gpu=gpu,
            state_dtype=getattr(config.optim, "state_dtype", "float32"),
            offload_states=getattr(config.optim, "offload", False),
            reference_copy=getattr(config, "reference", None) == "copy",
            teachers=(config.distil.teacher,) if hasattr(config, "distil") else (),
            recipe=config,
            shard=parallel.shard * parallel.pipeline,
            **{name: getattr(parallel, name) for name in layout},
        )

    @property
    def half_precision(self) -> bool:
        return self.precision != "fp32"

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share the tokens of a batch."""
        return self.context * self.ulysses

    @property
    def fsdp_ranks(self) -> int:
        """Ranks that shard parameters: FSDP also shards over the ranks of a sequence."""
        return self.shard * self.sequence_ranks

    @property
    def weight_ranks(self) -> int:
        """Ranks over which weights, gradients and optimizer states are distributed."""
        return self.fsdp_ranks * self.tensor

    @property
    def text_ranks(self) -> int:
        """Ranks that share the compute of the text model; tensor parallel ranks run the encoders in full."""
        return self.sequence_ranks * self.tensor

    @property
    def compute_bytes(self) -> float:
        """Bytes per element of activations and of weights in use."""
        return 2.0 if self.half_precision else 4.0


def meta_model(config: Any, settings: PlanSettings) -> PackedModel:
    """The model of a config without weights: frozen, cast and quantized as the model engine does it."""
    model: Any = MLLMModelKit(getattr(config, "lora", None)).build(config.model)
    assert isinstance(model, PackedModel)
    freeze(model, config.model.freeze)
    if settings.half_precision:
        cast_frozen_base(model, DTYPES[settings.precision])
    if settings.quantize:
        quantize_layers(model, settings.quantize, DTYPES[settings.precision])
    return model


def facts_of(model: PackedModel, config: Any = None) -> PlanFacts:
    module, name = load_spec(model.plan_facts, Path(), "plan_facts")
    facts: PlanFacts = getattr(module, name or "")(model, config)
    return facts


@dataclass(frozen=True)
class Block:
    module: nn.Module
    part: str
    rows: str  # the kind of rows that it processes
    in_backward: bool  # it trains, or something before it does
    keeps_attention: bool  # with activation checkpointing `attention`
    experts_config: Any

    @property
    def is_text(self) -> bool:
        return self.rows not in ("encoder", "projector")

    @cached_property  # asked for every pack size
    def elements(self) -> SavedElements:
        return saved_elements(self.module)

    @cached_property
    def gemm(self) -> float:
        """Forward FLOPs of its GEMMs for one row."""
        return _gemm_flops(self.module.modules(), self.experts_config)


class Amount(NamedTuple):
    """An amount of text blocks and one of encoder blocks: ranks shard the text model only."""

    text: float = 0.0
    encoder: float = 0.0

    @classmethod
    def of(cls, values: Iterable[tuple[Block, float]]) -> Amount:
        sums = [0.0, 0.0]
        for block, value in values:
            sums[not block.is_text] += value
        return cls(*sums)


class BlockCosts:
    """The blocks of a model with the settings of their parts."""

    def __init__(self, model: PackedModel, settings: PlanSettings) -> None:
        self.model = model
        self.settings = settings
        self.facts = facts_of(model, settings.recipe)
        self.mfu = MFUKit(model)
        checkpointing = settings.activation_checkpointing
        self.checkpointing = by_part(model, checkpointing, "model.activation_checkpointing")
        self.compiled = by_part(model, settings.compile, "model.compile")
        self.fp8 = by_part(model, settings.fp8, "model.fp8")
        unused = self.facts.unused_parameters()
        self.unused = {p for name, p in model.named_parameters() if name in unused}
        self.blocks = list(self._find_blocks())

    def _find_blocks(self) -> Iterator[Block]:
        after_trained = set[nn.Module]()
        has_trained = False
        facts = self.facts
        if facts.has_text_model:
            for module, _, _ in modules_in_forward_order(facts.backbone):
                if has_trained:
                    after_trained.add(module)
                has_trained = has_trained or _trains(module, recurse=False)
        trains = _trains(self.model)
        within_images = facts.attends_within_images()
        for module, part in blocks_by_part(self.model):
            rows = facts.rows_of(module, part)
            is_last = trains and facts.runs_last(rows)
            in_backward = module in after_trained or _trains(module) or is_last
            keeps = has_fused_attention(module) and not (part == "llm" and within_images)
            yield Block(module, part, rows, in_backward, keeps, facts.experts_config(rows))

    def trained(self) -> list[nn.Parameter]:
        """The parameters that get gradients and optimizer states."""
        return [p for p in self.model.parameters() if p.requires_grad and p not in self.unused]

    # ---- Activation checkpointing ---------------------------------------------------------------------------------

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

    def repeats(self, block: Block) -> bool:
        """Whether backward computes the GEMMs of a block a second time."""
        return block.in_backward and self.mode(block) in REPEATING

    def passes(self, block: Block) -> int:
        """Forwards and backwards to inputs."""
        return 1 + block.in_backward + self.repeats(block)

    def repeats_attention(self, block: Block) -> bool:
        is_mixer = not block.elements.attention  # of a hybrid model
        if self.checkpointing.get(block.part) == "attention" and is_mixer:
            return False
        return block.in_backward and self.mode(block) in REPEATING_ALL

    # ---- Bytes saved for backward ---------------------------------------------------------------------------------

    def saved_bytes(self, batch: PackedBatch, *, checkpointed: bool = True) -> Amount:
        """Bytes that all blocks save for backward; `checkpointed=False` ignores activation checkpointing.

        Not the inputs of blocks that are on the host.
        """
        saved = self._saved(batch, checkpointed)
        return Amount.of((block, size) for block, mode, size in saved if mode != "offload")

    def offloaded_bytes(self, batch: PackedBatch) -> list[float]:
        """Bytes of the inputs of blocks that wait on the host for backward, the largest first."""
        if "offload" not in self.checkpointing.values():
            return []
        sizes = (size for _, mode, size in self._saved(batch) if mode == "offload")
        return sorted(sizes, reverse=True)

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
        rows = self._num_rows(batch)
        tokens = rows["text"]
        size = self.settings.compute_bytes
        share = self.encoder_share(batch)
        for block in self.blocks:
            if not block.in_backward:
                continue
            mode = self.mode(block) if checkpointed else "none"
            elements = block.elements
            if self.unused and self.unused.intersection(block.module.parameters()):
                elements = _saved_for_keys(block.module)
            # The input of a block, which full checkpointing saves, is whole on each tensor parallel rank.
            ranks = self.settings.tensor if block.is_text else 1
            per_row = size * elements.full
            if mode == "none":
                eager = 1.0 if self.compiled.get(block.part) else EAGER
                per_row = size * elements.none * eager / ranks
                if self.fp8.get(block.part) == "all" and self.compiled.get(block.part):
                    per_row -= elements.fp8_gradients
            elif mode == "selective":
                per_row = size * elements.selective / ranks
            elif mode == "attention":  # and its log-sum-exp, in float32
                per_row += (size * elements.attention + 4 * elements.heads) / ranks
            saved = per_row * rows.get(block.rows, 0.0)
            saved = saved / self.settings.sequence_ranks if block.is_text else share * saved
            if mode == "none" and block.is_text and self.settings.context > 1:
                saved += size * self._gathered_elements() * tokens
            yield block, mode, saved

    def encoder_share(self, batch: PackedBatch) -> float:
        """The part of the encoders' work of the sequence parallel rank that has most of it."""
        media = self.facts.encoder_media(batch).values()
        ranks = self.settings.sequence_ranks
        largest = sum(len(item.values) * largest_share(item, ranks) for item in media)
        return largest / max(1, sum(len(item.values) for item in media))

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

    def _num_rows(self, batch: PackedBatch) -> dict[str, float]:
        """The number of rows of each kind."""
        rows = self.facts.num_rows(batch)
        for name, media in batch.media.items():
            if not len(media.row_counts):
                continue
            for kind, number, pair in self.mfu.encoder_work(name, media, batch):
                if pair is None:
                    rows[kind] = rows.get(kind, 0.0) + float(number)
        return rows

    # ---- FLOPs and bytes that are moved ---------------------------------------------------------------------------

    def repeated_flops(self, batch: PackedBatch) -> Amount:
        """GEMM FLOPs of the second forward of checkpointed blocks."""
        return self._total(batch, lambda block: block.gemm if self.repeats(block) else 0.0)

    def fp8_gain(self, batch: PackedBatch) -> Amount:
        """The bf16 FLOPs that take as long as FP8 GEMMs are faster: of outputs, input gradients, weight gradients."""

        def gain(block: Block) -> float:
            modules = self._fp8_modules(block)
            flops = self.passes(block) * _gemm_flops(modules, block.experts_config)
            low = flops * (1 - 1 / FP8_SPEEDUP)
            if self.fp8.get(block.part) != "all":
                return low
            params = [p for module in modules if fp8.fits(module) for p in module.parameters(False)]
            trained = sum(p.numel() for p in params if p.requires_grad and p not in self.unused)
            return low + 2.0 * trained * (1 - 1 / FP8_WEIGHT_GRADIENT_SPEEDUP)

        return self._total(batch, gain) if any(self.fp8.values()) else Amount()

    def _total(self, batch: PackedBatch, per_row: Callable[[Block], float]) -> Amount:
        rows = self._num_rows(batch)
        return Amount.of((b, per_row(b) * rows.get(b.rows, 0.0)) for b in self.blocks)

    def _fp8_modules(self, block: Block) -> list[nn.Module]:
        """The linear layers and stacked experts of a block that run in FP8."""
        if not self.fp8.get(block.part, False):
            return []
        layers = moe_layers.fp8_layers(block.module)
        if not gpu_by_name(self.settings.gpu).fp8_experts:
            return layers
        stacked = moe_layers.modules(block.module).values()
        return [*layers, *(module for module in stacked if moe_layers.fit_fp8(module))]

    def gathered_in_fp8(self) -> set[nn.Parameter]:
        """The weights that FSDP gathers as float8 values: `hf/experts/fp8_layers.py`."""
        layers = [m for b in self.blocks for m in self._fp8_modules(b) if isinstance(m, nn.Linear)]
        params = {layer.get_parameter("weight") for layer in layers}
        return {p for p in params if len(p) % self.settings.fsdp_ranks == 0}

    def dequantized_bytes(self) -> float:
        """Bytes that dequantizing the weights of blocks moves in a forward and backward: 4.5 bits in, a number out."""
        moved = 0.0
        for block in self.blocks:
            layers = quantized_layers(block.module).values()
            weights = sum(layer.in_features * layer.out_features for layer in layers)
            moved += self.passes(block) * weights * (9 / 16 + self.settings.compute_bytes)
        return moved

    def autocast_bytes(self) -> float:
        """Bytes of the low-precision weight copies that autocast saves for backward.

        Checkpointed blocks cast again in backward, and weights that are bf16 already need no copy. Compiled FP8 layers
        save the one that backward needs.
        """
        total = 0.0
        for block in self.blocks if self.settings.half_precision else []:
            if block.in_backward and self.mode(block) == "none":
                low = {p for module in self._fp8_modules(block) for p in module.parameters(False)}
                of_low = 1.0 if self.compiled.get(block.part) else 0.0
                for param in set(block.module.parameters()) - self.unused:
                    if param.element_size() > 2:
                        total += param.numel() * (of_low if param in low else 2.0)
        return total


def _trains(module: nn.Module, recurse: bool = True) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=recurse))


def _gemm_flops(modules: Iterable[nn.Module], config: Any) -> float:
    """Forward FLOPs of the GEMMs of modules, without those of their children, for one row."""
    flops = 0.0
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            flops += matmul_flops(module, name, param, config)
    return flops


# ---- What one block saves ------------------------------------------------------------------------------------------


@dataclass
class SavedElements:
    """Elements per row that backward of a block needs, by mode of activation checkpointing."""

    none: float = 0.0
    selective: float = 0.0  # outputs of GEMMs and attention
    full: float = 0.0  # the input of the block
    attention: float = 0.0  # the output of attention
    heads: float = 0.0  # of attention
    fp8_gradients: float = 0.0  # bytes less with `model.fp8=all`, in compiled blocks


def saved_elements(block: nn.Module) -> SavedElements:
    """Count the elements over the groups of a block: attention, MLP, experts, norms.

    A group of linear layers saves the input and the outputs of its first layers and the input of its last one.
    Rotary embeddings create new queries and keys. A norm saves its input. LoRA saves little besides the input of
    its layer, which is counted already.
    """
    saved = SavedElements()
    for group in block.children():
        modules = [module for name, module in group.named_modules() if "lora_" not in name]
        linear = [module for module in modules if isinstance(module, nn.Linear)]
        experts = [p for p in group.parameters() if p.ndim == 3]
        if linear:
            _add_linear(saved, group, linear)
        for weight in experts:
            per_token = _experts_per_token(group)
            saved.none += per_token * float(weight.shape[1] + weight.shape[2])
            saved.selective += per_token * float(weight.shape[1])
        if not linear and not experts:
            for name, param in group.named_parameters():
                if name.endswith("weight") and param.ndim == 1:  # of a norm
                    saved.none += param.numel()
    saved.selective += saved.full
    return saved


def _saved_for_keys(block: Any) -> SavedElements:
    """Of a block that only computes keys and values: the inputs of its norm and projections, and the rotated keys."""
    width = float(block.self_attn.k_proj.in_features)
    keys = float(block.self_attn.k_proj.out_features)
    return SavedElements(2 * width + 2 * keys, width + 2 * keys, width)


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
    if any(fp8.fits(layer) and layer.weight.requires_grad for layer in first):
        saved.fp8_gradients += first_input
    if fp8.fits(last) and last.weight.requires_grad:
        saved.fp8_gradients += -last_input if is_attention else last_input


def _experts_per_token(group: nn.Module) -> int:
    names = ("top_k", "num_experts_per_tok")
    numbers = (getattr(module, name, None) for module in group.modules() for name in names)
    return next((number for number in numbers if isinstance(number, int)), 1)


def has_fused_attention(block: nn.Module) -> bool:
    """Whether the layers of a block let a GPU compute attention by cuDNN or FlashAttention.

    They are operators, whose outputs the mode `attention` keeps. FlexAttention (soft caps, sinks, other head sizes),
    the reference loop (dropout) and mixers of hybrid models are none: there `attention` is `full`.
    """
    return any(hasattr(layer, "is_causal") and _is_fused(layer) for layer in block.modules())


def _is_fused(attention: Any) -> bool:
    softcap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    if softcap is not None or sinks is not None or getattr(attention, "attention_dropout", None):
        return False
    size = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    head_dim = int(size or HEAD_DIM)
    same_values = getattr(attention, "v_head_dim", head_dim) == head_dim
    return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and same_values
