"""The forward of a pipeline stage of a Hugging Face model, which `pipeline_cut.py` made of it.

The decoder's own forward runs on every stage: it makes positions and masks, and each block gets those of its own index.
Blocks of other stages are modules that return their input. The one in front of a stage's blocks returns what the stage
before has sent, and the one behind them keeps what the next stage is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.sequence_parallel import UlyssesShard

if TYPE_CHECKING:
    from mvp_engine.hf.model.packed_model import PackedModel

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


# ---- Running ----------------------------------------------------------------------------------------------------


def run_stage(model: PackedModel, batch: PackedBatch) -> dict[str, Tensor]:
    """The forward of a stage that is not the last one."""
    from mvp_engine.hf.model.packed_model import PackedModel

    if model.sequence_groups is not None:
        model.shard = model.sequence_groups.shard(batch.host_lengths, batch.input_ids.device)
    try:
        return {OUTPUT: PackedModel.hidden(model, batch, model.shard)}
    finally:
        model.shard = None


def hidden_of_stage(
    model: PackedModel,
    batch: PackedBatch,
    shard: UlyssesShard | None,
    input_ids_1T: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """The last hidden states (T, D) on the last stage; on the others what the next one is sent, (1, T, D).

    The first stage runs the model on token ids and media, the others their decoder on what they receive.
    """
    stage = model.stage
    assert stage is not None
    if stage.link.is_first:
        stage.positions = options["position_ids"]
        model._register_media(batch, input_ids_1T)
        model.base()(input_ids=input_ids_1T, **options)
    else:
        out = _run_decoder(model, stage, batch, shard, options)
    if stage.link.is_last:
        return model._hidden_of(out)[0]
    output = stage.output
    assert output is not None
    stage.output = None
    return output


def _run_decoder(
    model: PackedModel,
    stage: Stage,
    batch: PackedBatch,
    shard: UlyssesShard | None,
    options: dict[str, Any],
) -> Any:
    tokens = batch.num_tokens if shard is None else shard.sizes[shard.rank]
    size = hidden_size(model)
    stage.received = stage.link.receive((1, tokens, size))
    # Embeddings give the decoder a shape and a dtype; a decoder with encoders cuts them to this rank's tokens.
    is_cut = model.decoder() is model.base()
    length = tokens if is_cut else batch.num_tokens
    embeds = stage.received.detach().new_zeros(1).expand(1, length, size)
    try:
        return model.decoder()(inputs_embeds=embeds, **options)
    finally:
        stage.received = None


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
