"""Pipeline stages of a Hugging Face model: a rank keeps a slice of the decoder's blocks.

The model is built completely on the meta device; what other stages hold is then replaced by modules without parameters,
so names stay those of the whole model. Stage 0 has the embeddings and the encoders, the last one the final norm and the
head. `check_cut` refuses decoders whose blocks take more from each other than hidden states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.attention import PACK_ARGUMENTS, NoMask
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.hf.model.packed_model import PackedModel

# The forward of a stage.
#
# The decoder's own forward runs on every stage: it makes positions and masks, and each block gets those of its own
# index. Blocks of other stages are modules that return their input. The one in front of a stage's blocks returns what
# the stage before has sent, and the one behind them keeps what the next stage is sent.

OUTPUT = "stage_output"  # the key of what a stage that is not the last one returns


class OtherTensor(NamedTuple):
    """A tensor that another stage holds."""

    part: str  # of the model; "" for buffers
    size: int
    trained: bool


@dataclass
class Stage:
    """What a rank's stage of a model holds, and the activations of the forward that runs."""

    link: StageLink
    whole: PackedModel  # the model before the cut, on the meta device
    blocks: range  # of the decoder
    elsewhere: dict[str, OtherTensor] = field(default_factory=dict)  # of other stages, by name
    tied: tuple[str, ...] = ()  # parameters that the first and the last stage both hold
    received: Tensor | None = None
    output: Tensor | None = None
    positions: Tensor | None = None

    @property
    def copies(self) -> frozenset[str]:
        """Parameters that the first stage holds, too, which counts and saves them."""
        return frozenset() if self.link.is_first else frozenset(self.tied)

    def forward(self, model: PackedModel, batch: PackedBatch) -> dict[str, Tensor]:
        """The outputs of a stage that is not the last one."""
        if model.sequence_groups is not None:
            model.shard = model.sequence_groups.shard(batch.host_lengths, batch.input_ids.device)
        try:
            return {OUTPUT: PackedModel.hidden(model, batch, model.shard)}
        finally:
            model.shard = None

    def hidden(
        self,
        model: PackedModel,
        batch: PackedBatch,
        shard: UlyssesShard | None,
        input_ids_1T: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """The last hidden states (T, D) on the last stage; on the others what the next one is sent, (1, T, D).

        The first stage runs the model on token ids and media, the others their decoder on what they receive.
        """
        if self.link.is_first:
            self.positions = options["position_ids"]
            model.base()(input_ids=input_ids_1T, **options)
        else:
            out = self._run_decoder(model, batch, shard, options)
        if self.link.is_last:
            return model._hidden_of(out)[0]
        output = self.output
        assert output is not None
        self.output = None
        return output

    def _run_decoder(
        self,
        model: PackedModel,
        batch: PackedBatch,
        shard: UlyssesShard | None,
        options: dict[str, Any],
    ) -> Any:
        tokens = batch.num_tokens if shard is None else shard.sizes[shard.rank]
        size = hidden_size(model)
        self.received = self.link.receive((1, tokens, size))
        # Embeddings give the decoder a shape and a dtype; a decoder with encoders cuts them to this rank's tokens.
        is_cut = model.decoder() is model.base()
        length = tokens if is_cut else batch.num_tokens
        embeds = self.received.detach().new_zeros(1).expand(1, length, size)
        try:
            return model.decoder()(inputs_embeds=embeds, **options)
        finally:
            self.received = None


class OtherStage(nn.Module):
    """In the place of a module that another stage holds. It has the plain attributes of it, and no parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in ("forward", "training"):
                setattr(self, name, value)
        for name, param in module.named_parameters(recurse=False):
            self.__dict__[name] = torch.empty_like(param, device="meta", requires_grad=False)
        for name, value in module._parameters.items():
            if value is None:
                self.__dict__[name] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class Receiver(OtherStage):
    """The block in front of a stage's blocks."""

    stage: Stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stage.received


class Sender(OtherStage):
    """The block behind a stage's blocks."""

    stage: Stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.stage.output = super().forward(*args, **kwargs)
        return self.stage.output


def send_outputs(model: PackedModel) -> None:
    """Register a hook: the output of a stage is sent, and its caller gets zeros in the shapes of the outputs.

    Call it after FSDP, whose hooks must see the tensor that carries the gradient.
    """
    stage = model.stage
    if stage is not None and not stage.link.is_last:
        model.register_forward_hook(_send_output, with_kwargs=True)


def _send_output(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    output = outputs[OUTPUT]
    model.stage.link.send(output)
    given = dict(zip(("batch", "outputs"), args, strict=False)) | kwargs
    batch: PackedBatch = given["batch"]
    tokens = batch.num_tokens
    shapes: dict[str, tuple[int, ...]] = {"loss": (), "hidden_states": (tokens, output.shape[-1])}
    sequences = getattr(batch, "num_real_sequences", batch.num_sequences)
    head = model.hf.get_output_embeddings()
    if head is not None:
        shapes["next_logits"] = (sequences, head.weight.shape[0])
    zeros = {}
    for name in given["outputs"]:
        shape = shapes.get(name, (tokens,))
        if name == "next_tokens":
            zeros[name] = torch.zeros(shape, dtype=torch.int64, device=output.device)
            continue
        needs_grad = torch.is_grad_enabled() and name != "losses"
        zeros[name] = torch.zeros(shape, device=output.device, requires_grad=needs_grad)
    return zeros


def hidden_size(model: PackedModel) -> int:
    config: Any = model.hf.config
    return int(config.get_text_config().hidden_size)


# Cutting a model.

# What an encoder's model may pass to its decoder. Later stages get the same, or do not need it.
_DECODER_INPUTS = {"inputs_embeds", "position_ids", *PACK_ARGUMENTS}
_DECODER_INPUTS |= {"visual_pos_masks", "deepstack_visual_embeds"}  # used behind the first blocks
MODEL_TYPES = ("language_model", "value_model")  # whose heads are per token


def cut_model(model: PackedModel, link: StageLink, skeleton: Any) -> None:
    """Drop what other stages hold. `skeleton`: the same model on the meta device, before anything was sharded."""
    key = f"parallel.pipeline={link.stages}"
    check_supported(model, key)
    blocks = decoder_blocks(model, key)
    ran_before = check_cut(skeleton, key)
    before, after = _ends(model, blocks, ran_before)
    of_block = _num_params(blocks) / len(blocks)
    ends = (_num_params(before) / of_block, _num_params(after) / of_block)
    bounds = stage_bounds(len(blocks), link.stages, deepstack_layers(model), key, ends)
    for index in range(link.stages):
        held_there: list[nn.Module] = list(blocks[bounds[index] : bounds[index + 1]])
        held_there += before if index == 0 else []
        held_there += after if index == link.stages - 1 else []
        if _trains([model]) and not _trains(held_there):
            raise UserError(
                f"{key}: stage {index} would have no trained parameters (model.freeze, lora.target_modules). "
                "Set parallel.shard instead"
            )
    parts = parts_of(model)
    every: dict[str, OtherTensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        every[name] = OtherTensor(parts.get(name, ""), value.numel(), value.requires_grad)
    head: Any = model.hf.get_output_embeddings()  # type: ignore[operator]
    embedding: Any = model.hf.get_input_embeddings()  # type: ignore[operator]
    is_tied = head is not None and head.weight is embedding.weight
    tied = tuple(n for n, p in model.named_parameters() if is_tied and p is embedding.weight)
    own = range(bounds[link.stage], bounds[link.stage + 1])
    stage = Stage(link, skeleton, own, tied=tied)
    if not link.is_first:
        kept = {embedding} if is_tied and link.is_last else set()
        _drop(model, [module for module in before if module not in kept])
    if not link.is_last:
        _drop(model, after)
    for index, block in enumerate(blocks):
        if index in stage.blocks:
            continue
        kind: type[OtherStage] = OtherStage
        if index == stage.blocks.start - 1:
            kind = Receiver
        elif index == stage.blocks.stop:
            kind = Sender
        blocks[index] = kind(block)
        if kind is not OtherStage:
            blocks[index].__dict__["stage"] = stage  # not a module
    held = model.state_dict().keys()
    stage.elsewhere = {name: one for name, one in every.items() if name not in held}
    model.stage = stage
    decoder = model.decoder()
    if link.is_first and decoder is not model.base():
        hook = partial(_check_decoder_inputs, stage)
        decoder.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def stage_bounds(
    blocks: int, stages: int, first_at_least: int, key: str, ends: tuple[float, float] = (0.0, 0.0)
) -> list[int]:
    """The first block of each stage, and the number of all.

    Stages differ by one block at most. `ends`: parameters of the first stage and of the last one outside of blocks
    (embeddings and encoders; head), in units of a block: what does not divide goes to the stages with least.
    """
    if blocks < stages:
        raise UserError(f"{key}: the model has {count(blocks, 'block')}, and each stage needs one")
    sizes = [blocks // stages] * stages
    more = [0.0] * stages
    more[0] += ends[0]
    more[-1] += ends[1]
    for stage in sorted(range(stages), key=lambda stage: more[stage])[: blocks % stages]:
        sizes[stage] += 1
    while sizes[0] < first_at_least:
        largest = max(range(1, stages), key=lambda stage: (sizes[stage], stage))
        if sizes[largest] == 1:
            raise UserError(
                f"{key}: features of the encoder are added behind the first {first_at_least} blocks, which one stage "
                f"must hold, and {count(blocks - first_at_least, 'block')} do not give each other stage one. Use "
                f"{blocks - first_at_least + 1} stages or fewer"
            )
        sizes[largest] -= 1
        sizes[0] += 1
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _num_params(modules: Iterable[nn.Module]) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())


def _trains(modules: Iterable[nn.Module]) -> bool:
    return any(param.requires_grad for module in modules for param in module.parameters())


def deepstack_layers(model: PackedModel) -> int:
    """The number of first blocks behind which the decoder adds features of the encoder (DeepStack)."""
    for config in attention.config_tree(model.hf.config):
        indexes = getattr(config, "deepstack_visual_indexes", None)
        if indexes:
            return len(indexes)
    return 0


def decoder_blocks(model: PackedModel, key: str) -> nn.ModuleList:
    """The decoder's list of blocks."""
    config: Any = model.hf.config
    wanted = config.get_text_config().num_hidden_layers
    lists = [child for child in model.decoder().children() if isinstance(child, nn.ModuleList)]
    found = [blocks for blocks in lists if len(blocks) == wanted]
    if len(found) != 1 or len(lists) != 1:
        raise _refused(key, model, f"its decoder has {len(lists)} lists of modules, not one")
    return found[0]


def check_supported(model: PackedModel, key: str) -> None:
    """Raise for kinds of models that stages do not know."""
    reasons = {
        f"model.type={model.model_type}": model.model_type not in MODEL_TYPES,
        "model.quantize": bool(model.quantize),
        "mixers with states": model.mixers.is_used,
        "padded rows": bool(model.padded_rows),
        "a mask that depends on media (token_type_ids)": _builds_masks(model),
        "its head inside of its backbone": not getattr(model, "has_backbone", True),
    }
    for reason, applies in reasons.items():
        if applies:
            raise _refused(key, model, f"{reason} is not supported with it")
    if not all(param.is_meta for param in model.parameters()):
        raise UserError(
            f"{key}: the model has its weights already, and each stage shall load its own: build it on the meta "
            "device (LanguageModel.on_meta, or model.path)"
        )


def _builds_masks(model: PackedModel) -> bool:
    """Does the model, and not its decoder, build the attention mask?"""
    parameters = inspect.signature(model.base().forward).parameters
    return model.base() is not model.decoder() and "token_type_ids" in parameters


def _refused(key: str, model: PackedModel, reason: str) -> UserError:
    model_type = model.hf.config.model_type  # type: ignore[union-attr]
    return UserError(f"{key}: {model_type} cannot be cut into stages: {reason}. Set parallel.shard")


def _drop(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    dropped = set(modules)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in dropped:
                parent._modules[name] = OtherStage(child)


# ---- Which decoders can be cut ----------------------------------------------------------------------------------


class _Recorder(OtherStage):
    """A block that notes what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = super().forward(*args, **kwargs)
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
        output = hidden.clone()
        self.calls.append((hidden, others, output))  # type: ignore[operator, union-attr]
        return output


def check_cut(model: PackedModel, key: str) -> set[int]:
    """Raise unless a decoder gives each block the output of the one before, and nothing else that depends on it.

    Returns which of `_outside_of_blocks` run before the blocks. Runs a copy of the decoder, on the meta device, with
    blocks that only note their inputs.
    """
    probe = copy.deepcopy(model)
    calls: list[tuple[Tensor, list[Any], Tensor]] = []
    ran_before: set[int] = set()
    blocks = decoder_blocks(probe, key)
    for index, module in enumerate(_outside_of_blocks(probe, blocks)):
        module.register_forward_pre_hook(partial(_note, index, calls, ran_before))
    for index, block in enumerate(blocks):
        blocks[index] = recorder = _Recorder(block)
        recorder.__dict__["calls"] = calls
    with torch.device("meta"):
        embeds = torch.zeros(1, 3, hidden_size(probe), requires_grad=True)
        positions = torch.arange(3)[None]
        cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    try:
        probe.decoder()(
            inputs_embeds=embeds,
            position_ids=positions,
            use_cache=False,
            **attention.boundaries(cu_seqlens, 3),
        )
    except Exception as error:
        reason = f"its decoder fails without its blocks ({type(error).__name__}: {error})"
        raise _refused(key, model, reason) from error
    previous: Tensor | None = None
    for hidden, others, output in calls:
        if previous is not None and hidden is not previous:
            raise _refused(key, model, "its decoder changes hidden states between blocks")
        if any(_is_shared(value) for value in others):
            raise _refused(key, model, "its blocks get more from each other than hidden states")
        previous = output
    if len(calls) != len(blocks):
        raise _refused(key, model, f"its decoder calls {len(calls)} of {len(blocks)} blocks")
    return ran_before


def _note(index: int, calls: list[Any], ran_before: set[int], *_: Any) -> None:
    if not calls:
        ran_before.add(index)


def _ends(
    model: PackedModel, blocks: nn.ModuleList, ran_before: set[int]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules with parameters that the first stage holds, and those that the last one holds."""
    in_base = set(model.base().modules())
    in_decoder = set(model.decoder().modules())
    embedding = model.hf.get_input_embeddings()  # type: ignore[operator]
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    for index, module in enumerate(_outside_of_blocks(model, blocks)):
        is_encoder = module in in_base and module not in in_decoder
        if module is embedding or is_encoder or index in ran_before:
            before.append(module)
        else:
            after.append(module)
    return before, after


def _is_shared(value: Any) -> bool:
    """Could an input of a block depend on hidden states, or carry something from block to block?"""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple):
        return any(_is_shared(item) for item in value)
    return isinstance(value, dict | list)


def _outside_of_blocks(model: PackedModel, blocks: nn.ModuleList) -> list[nn.Module]:
    """The outermost modules with parameters, none of which holds the blocks; always in the same order."""

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child is blocks:
                continue
            if any(part is blocks for part in child.modules()):
                yield from walk(child)
            elif any(True for _ in child.parameters()):
                yield child

    return list(walk(model))


def _check_decoder_inputs(
    stage: Stage, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """On stage 0 of a model with encoders: later stages must be able to give their decoder the same inputs."""
    wrong = ""
    if kwargs.get("position_ids") is not stage.positions:
        wrong = "positions that are not those of the batch"
    for name, value in kwargs.items():
        plain = value is None or isinstance(value, bool | int | float | str | NoMask)
        if not plain and name not in _DECODER_INPUTS:
            wrong = name
    if wrong:
        raise UserError(
            f"parallel.pipeline > 1: {type(decoder).__name__} gets {wrong}, which later stages do not have. Set "
            "parallel.pipeline=1"
        )


# The weights of a whole model, on every rank of its layout, whichever pipeline stage holds them: for exports.


class _Facts(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    stage: int  # the first one that holds it


class WholeWeights:
    """The state dict of a model over its stages. All ranks create it and fetch the same tensors in the same order."""

    def __init__(self, model: PackedModel) -> None:
        # The parameters themselves, whose data may be offloaded and loaded back in between.
        self._own = model.state_dict(keep_vars=True)
        self._link = None if model.stage is None else model.stage.link
        self._facts: dict[str, _Facts] = {}
        for stage, of_stage in enumerate(self._of_stages()):
            for name, (shape, dtype) in of_stage.items():
                self._facts.setdefault(name, _Facts(shape, dtype, stage))

    def _of_stages(self) -> list[Any]:
        own = {name: (value.shape, value.dtype) for name, value in self._own.items()}
        return [own] if self._link is None else self._link.all_gather(own)

    def like(self, name: str) -> Tensor:
        """A tensor on the meta device."""
        shape, dtype, _ = self._facts[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def fetch(self, name: str) -> Tensor:
        """The full tensor; a collective."""
        if self._link is None:
            return full_tensor(self._own[name].detach())
        shape, dtype, stage = self._facts[name]
        if stage == self._link.stage:
            full = full_tensor(self._own[name].detach()).contiguous()
        else:
            full = torch.empty(shape, dtype=dtype, device=self._link.device)
        return self._link.from_stage_(full, stage)
