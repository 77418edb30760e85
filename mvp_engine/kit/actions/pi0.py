"""Pi0Policy: pi0 on packed batches. PaliGemma reads the prefix, a Gemma expert turns noise into actions.

Legend: T prefix tokens, S sequences, N noise draws, C steps of a chunk, A action dimensions, U = S + S * N * C expert
tokens (all states, then all chunks), D hidden size.

transformers' forward keeps the prefix in a KV cache, so it cannot use activation checkpointing, and takes one draw per
prefix. Here the keys and values of each prefix layer are *outputs* of the layer and inputs of the expert's layer: to
autograd, FSDP and checkpointing they are tensors like any other. A state token attends to its prefix and itself, so it
is the same for all draws and runs once. The action tokens of a draw attend to prefix, state and each other.

Of the model *instance* the forward of the prefix decoder and of its layers are replaced; `own_forward` gives
transformers' own back for the comparison at the start of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf.media.media_features import copy_to_device
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.auto_model import from_auto
from mvp_engine.hf.model.flop_costs import FlopCosts
from mvp_engine.hf.model.language_model import config_logit_steps
from mvp_engine.hf.model.packed_model import Outputs, losses_of
from mvp_engine.hf.model.preflight import EXACT, eager_eval
from mvp_engine.kit.actions import query_groups
from mvp_engine.kit.actions.action_model import (
    LENGTH_MULTIPLE,
    ActionAdapter,
    ActionModel,
    ActionSpec,
    field,
    run_base,
)
from mvp_engine.kit.actions.costs import add_pi0_costs
from mvp_engine.kit.actions.plugin import CHUNK, MASK, NOISE, STATE, TIMES
from mvp_engine.kit.actions.query_groups import KeyRows, QueryGroup
from mvp_engine.ops.flow_matching import euler_times, noisy_sample, velocity_losses
from mvp_engine.ops.linear_cross_entropy import linear_log_probs, linear_loss

Keys = tuple[tuple[Tensor, Tensor], ...]  # keys and values (1, K, T, d) of each prefix layer
TEXT_OUTPUTS = ("loss", "losses", "log_probs")


class Pi0Policy(ActionModel):
    """pi0 with transformers' weights and names; exports load with `PI0ForConditionalGeneration`."""

    plan_facts = "mvp_engine.kit.actions.costs:Pi0Facts"
    has_causal_text = False
    provides = ("action_losses", "velocity", "actions", *TEXT_OUTPUTS, "hidden_states")

    def __init__(self, backbone: Any) -> None:
        _check_config(backbone.config)
        super().__init__(backbone)
        config = backbone.config
        self.action_spec = ActionSpec.of(config, "flow")
        # PI0Config names no text config, so `attention.use` of the base class took both models for encoders.
        attention.use(config.vlm_config)
        query_groups.use(config.vlm_config.get_text_config())
        query_groups.use(config.dit_config)
        own = (backbone.model.dit, backbone.embed_action_time, backbone.action_out_proj)
        self.own_parts = dict.fromkeys(own, "action")
        # No input reaches the expert's token embeddings: without gradients and optimizer states for them, pi0 needs
        # 3 GB less.
        backbone.model.dit.embed_tokens.weight.requires_grad_(False)
        self._replace_forwards()

    @classmethod
    def build(cls, config: Any) -> Pi0Policy:
        from transformers import AutoModelForMultimodalLM

        return cls(from_auto(AutoModelForMultimodalLM, config))

    def base(self) -> nn.Module:
        return self.hf.model.vlm  # type: ignore[union-attr, return-value]

    def decoder(self) -> nn.Module:
        return self.hf.model.vlm.language_model  # type: ignore[union-attr, return-value]

    def engine_adapter(self) -> ActionAdapter:
        return Pi0Adapter(self)

    def flop_costs(self) -> FlopCosts:
        costs = super().flop_costs()
        add_pi0_costs(costs, self)
        return costs

    def num_draws(self, batch: PackedBatch) -> int:
        noise = batch.sequence_fields.get(NOISE)
        return 1 if noise is None else noise.shape[1]

    @property
    def backbone(self) -> Any:
        return self.base()

    @property
    def expert(self) -> Any:
        return self.hf.model.dit  # type: ignore[union-attr]

    @property
    def text_parameters(self) -> set[str]:
        """Parameters that only text outputs use: actions end at the keys and values of the last prefix layer."""
        decoder: Any = self.decoder()
        last = decoder.layers[-1]
        attention_part = last.self_attn
        modules = [attention_part.q_proj, attention_part.o_proj, last.mlp]
        modules += [last.post_attention_layernorm, decoder.norm]
        own = {param for module in modules for param in module.parameters()}
        return {name for name, param in self.named_parameters() if param in own}

    # ---- The prefix -----------------------------------------------------------------------------

    def _replace_forwards(self) -> None:
        decoder: Any = self.decoder()
        decoder.forward = partial(_prefix_forward, decoder)
        for layer in decoder.layers:
            layer.forward = partial(_forward_with_keys, layer)

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """Run the model as transformers does, uncompiled and without activation checkpointing."""
        decoder: Any = self.decoder()
        replaced = [decoder, *decoder.layers, *self.expert.layers]
        before = [(module, module.__dict__.pop("forward", None)) for module in replaced]
        try:
            with attention.eager_attention(self.hf.config):
                yield
        finally:
            for module, forward in before:
                if forward is not None:
                    module.forward = forward

    def _prefix(self, batch: PackedBatch, keys_only: bool) -> tuple[Tensor | None, Keys]:
        """Hidden states (T, D), unless `keys_only`, and keys and values of each layer."""
        # Without token types every token of a prefix sees all others, which fused kernels compute.
        has_types = "token_type_ids" in batch.token_fields
        out = run_base(
            self, batch, need_types=False, is_bidirectional=not has_types, keys_only=keys_only
        )
        hidden_1TD = out.last_hidden_state
        return None if keys_only else hidden_1TD[0], out.past_key_values

    # ---- The expert -----------------------------------------------------------------------------

    def _velocity(
        self,
        batch: PackedBatch,
        keys: Keys,
        noisy_SNCA: Tensor,
        times_SN: Tensor,
        suffix: Suffix | None = None,
    ) -> Tensor:
        """The velocity (S, N, C, A), float32, at noisy actions and their times."""
        hf: Any = self.hf
        draws = noisy_SNCA.shape[1]
        state_SQ = field(batch, STATE, "an action model")
        suffix = suffix or suffix_groups(batch, 1, draws, self.action_spec.chunk)
        state_rows = state_SQ.repeat_interleave(draws, 0)
        # (S * N, 1 + C, D): a state, then the chunk
        embeds = hf.embed_action_time(state_rows, noisy_SNCA.flatten(0, 1), times_SN.flatten())
        states_SD = embeds[::draws, 0]
        chunks_UD = embeds[:, 1:].flatten(0, 1)
        # Not a view, which later layers do not get either: they would be compiled a second time.
        hidden = torch.cat([states_SD[None], chunks_UD[None]], dim=1)
        hidden_1UD = self._run_expert(hidden, suffix.position_ids[None], keys, suffix.groups)
        velocity = hf.action_out_proj(hidden_1UD[0, len(state_SQ) :])
        return velocity.float().view(noisy_SNCA.shape)

    def _run_expert(
        self, hidden_1UD: Tensor, position_ids: Tensor, keys: Keys, groups: list[QueryGroup]
    ) -> Tensor:
        expert = self.expert
        position_embeddings = expert.rotary_emb(hidden_1UD, position_ids=position_ids)
        if hidden_1UD.is_cuda:
            # Many packs have equal numbers of sequences: the first other one would compile the layers again.
            for tensor in (hidden_1UD, position_ids, *position_embeddings):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        for layer, prefix in zip(expert.layers, keys, strict=True):
            hidden_1UD = layer(
                hidden_1UD,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                use_cache=False,
                prefix=prefix,
                query_groups=groups,
            )
        return expert.norm(hidden_1UD)

    def _sample(self, batch: PackedBatch, keys: Keys) -> Tensor:
        """Actions (S, C, A) by Euler's method, from the first noise draw of the batch."""
        x = field(batch, NOISE, "`actions`")[:, :1].float()
        steps = self.num_steps
        suffix = suffix_groups(batch, 1, 1, self.action_spec.chunk)
        for time in euler_times(steps):
            times = torch.full(x.shape[:2], time, dtype=torch.float32, device=x.device)
            x = x - self._velocity(batch, keys, x, times, suffix) / steps
        return x[:, 0]

    # ---- Outputs --------------------------------------------------------------------------------

    def _compute(
        self, batch: PackedBatch, wanted: tuple[str, ...], kv_cache: Any = None
    ) -> Outputs:
        needs_text = {*TEXT_OUTPUTS, "hidden_states"} & set(wanted)
        hidden_TD, keys = self._prefix(batch, keys_only=not needs_text)
        computed: Outputs = {}
        if hidden_TD is not None:
            computed["hidden_states"] = hidden_TD
        if {"velocity", "action_losses"} & set(wanted):
            noise = field(batch, NOISE, "`velocity`").float()
            times = field(batch, TIMES, "`velocity`").float()
            clean = field(batch, CHUNK, "`velocity`")[:, None].float()
            noisy = noisy_sample(clean.expand_as(noise), noise, times)
            if (
                self._noisy is not None
            ):  # of the caller; behind it come those of dummies (lockstep.py)
                noisy = torch.cat([self._noisy, noisy[len(self._noisy) :]])
            velocity = self._velocity(batch, keys, noisy, times)
            computed["velocity"] = velocity
            if "action_losses" in wanted:
                mask = field(batch, MASK, "`action_losses`")[:, None]
                computed["action_losses"] = velocity_losses(velocity, clean, noise, mask).mean(1)
        if "actions" in wanted:
            computed["actions"] = self._sample(batch, keys)
        if hidden_TD is not None and set(TEXT_OUTPUTS) & set(wanted):
            computed |= self.outputs(hidden_TD, batch.labels, wanted)
        return {name: computed[name] for name in wanted}

    def outputs(self, hidden_TD: Tensor, labels_T: Tensor, wanted: tuple[str, ...]) -> Outputs:
        """Text: the embeddings are the head, as in PaliGemma."""
        decoder: Any = self.decoder()
        weight_VD = decoder.embed_tokens.weight
        steps = config_logit_steps(decoder.config)
        options: dict[str, Any] = {"scale": steps.scale, "softcap": steps.softcap}
        if "log_probs" in wanted:
            log_probs_T = linear_log_probs(hidden_TD, weight_VD, labels_T, **options).log_probs
            return {"log_probs": log_probs_T, **losses_of(log_probs_T)}
        loss, losses_T = linear_loss(hidden_TD, weight_VD, labels_T, **options)
        return {"loss": loss, "losses": losses_T}

    @torch.no_grad()
    def reference_velocity(self, batch: PackedBatch) -> Tensor:
        """The velocity (1, N, C, A) of one sequence from transformers' own forward."""
        assert batch.num_sequences == 1
        fields = batch.sequence_fields
        draws = fields[NOISE].shape[1]
        ids = batch.input_ids.expand(draws, -1)
        images = batch.media["pixel_values"].values
        pixels = images.expand(draws, *images.shape)
        noisy = noisy_sample(
            fields[CHUNK].expand_as(fields[NOISE][0]), fields[NOISE][0], fields[TIMES][0]
        )
        with self.own_forward():
            out = self.hf(
                state=fields[STATE].expand(draws, -1),
                noise=noisy,
                timestep=fields[TIMES][0],
                input_ids=ids,
                pixel_values=pixels,
                pixel_attention_mask=torch.ones(
                    pixels.shape[:2], dtype=torch.bool, device=ids.device
                ),
                attention_mask=torch.ones_like(ids),  # without it, positions would differ
            )
        return out.logits.float()[None]


def _check_config(config: Any) -> None:
    prefix = config.vlm_config.text_config
    expert = config.dit_config
    for name, part in {"vlm_config.text_config": prefix, "dit_config": expert}.items():
        if part.model_type != "gemma":
            raise UserError(
                f"pi0: {name} is a {part.model_type} model; both must be gemma, as in lerobot/pi0_base"
            )
    if prefix.num_hidden_layers != expert.num_hidden_layers:
        raise UserError(
            f"pi0: the prefix has {prefix.num_hidden_layers} layers and the expert {expert.num_hidden_layers}; each "
            "layer of the expert reads the keys of one prefix layer. Set both num_hidden_layers to the same number"
        )
    for name in ("head_dim", "num_key_value_heads"):
        if getattr(prefix, name) != getattr(expert, name):
            raise UserError(
                f"pi0: {name} is {getattr(prefix, name)} in vlm_config.text_config and {getattr(expert, name)} in "
                "dit_config; keys of both are read together. Set both to the same number"
            )


def _prefix_forward(
    decoder: Any,
    inputs_embeds: Tensor,
    position_ids: Tensor,
    attention_mask: Any = None,
    is_bidirectional: bool = True,
    keys_only: bool = False,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The prefix decoder's forward on one packed row, with the keys and values of its layers as `past_key_values`."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    position_embeddings = decoder.rotary_emb(inputs_embeds, position_ids=position_ids)
    hidden: Tensor | None = inputs_embeds
    found = []
    for index, layer in enumerate(decoder.layers):
        hidden, key, value = layer(
            hidden,
            keys_only=keys_only and index == len(decoder.layers) - 1,
            attention_mask=None if is_bidirectional else attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            use_cache=False,
            **kwargs,
        )
        found.append((key, value))
    keys: Any = tuple(found)
    last: Any = None if hidden is None else decoder.norm(hidden)
    return BaseModelOutputWithPast(last_hidden_state=last, past_key_values=keys)


def _forward_with_keys(
    layer: Any, hidden: Tensor, keys_only: bool = False, **kwargs: Any
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The layer's own forward; its keys and values are outputs too.

    `keys_only`: nothing else is computed. A compiled layer would give weights that lead nowhere a gradient of zeros,
    and weight decay would change them.
    """
    if keys_only:
        key, value = _keys_and_values(layer, hidden, *kwargs["position_embeddings"])
        return None, key, value
    found: list[Tensor] = []
    out = type(layer).forward(layer, hidden, key_values=found, **kwargs)
    # FSDP2 warns about views: an in-place change of one would lose the hooks for the layer's weights.
    return out, found[0].clone(), found[1].clone()


def _keys_and_values(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (1, K, T, d) as the attention of a Gemma layer computes them."""
    from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

    normed = layer.input_layernorm(hidden)
    heads = (*normed.shape[:-1], -1, layer.self_attn.head_dim)
    key = layer.self_attn.k_proj(normed).view(heads).transpose(1, 2)
    value = layer.self_attn.v_proj(normed).view(heads).transpose(1, 2)
    _, key = apply_rotary_pos_emb(key, key, cos, sin)
    return key, value.clone()


# The suffix of packed prefixes: tokens of states and action chunks, their positions, and the keys each attends to.
#
# Legend: S sequences, N draws of noise, C steps of a chunk, L_s the length of prefix s, T the tokens of all prefixes.
#
# Suffix tokens lie behind all prefixes: first `heads` tokens of each sequence (its state), which all draws share, then
# the chunks, (S, N, C). Tables are built on the host from lengths that the host has: no host sync.


class Suffix(NamedTuple):
    """What a forward needs of all suffix tokens."""

    position_ids: Tensor  # (U,): they continue those of the prefix
    groups: list[QueryGroup]  # the states, then the chunks


def suffix_groups(batch: PackedBatch, heads: int, draws: int, chunk: int) -> Suffix:
    """States attend to their prefix and themselves; a chunk to its prefix, its state and itself."""
    lengths = batch.host_lengths
    count = len(lengths)
    prefix = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    first_chunk = prefix + count * heads
    state_keys = []
    chunk_keys = []
    for s in range(count):
        own = torch.arange(int(starts[s]), int(starts[s + 1]))
        state = prefix + s * heads + torch.arange(heads)
        state_keys += [own, state]
        for n in range(draws):
            start = first_chunk + (s * draws + n) * chunk
            chunk_keys += [own, state, torch.arange(start, start + chunk)]
    sizes_S = torch.tensor(lengths)
    total = first_chunk + count * draws * chunk
    with_state_S = sizes_S + heads
    with_chunk = (with_state_S + chunk).repeat_interleave(draws)
    groups = [
        _group(count, heads, state_keys, with_state_S, total),
        _group(count * draws, chunk, chunk_keys, with_chunk, total),
    ]
    positions = torch.cat(
        [
            (sizes_S[:, None] + torch.arange(heads)).flatten(),
            (with_state_S.repeat_interleave(draws)[:, None] + torch.arange(chunk)).flatten(),
        ]
    )
    device = batch.cu_seqlens.device
    return Suffix(copy_to_device(positions, device), [group.to(device) for group in groups])


def _group(
    sequences: int, queries: int, keys: list[Tensor], key_lengths: Tensor, total: int
) -> QueryGroup:
    """`sequences` of `queries` each."""
    boundaries = torch.arange(sequences + 1, dtype=torch.int32) * queries
    key_boundaries = torch.cat([torch.zeros(1, dtype=torch.long), key_lengths.cumsum(0)]).int()
    longest = -(-int(key_lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE  # a bound for kernels
    return QueryGroup(
        cu_seqlens=boundaries,
        max_seqlen=queries,
        is_even=True,
        keys=KeyRows.of(torch.cat(keys), total),
        cu_seqlens_k=key_boundaries,
        max_seqlen_k=longest,
    )


# The preflight: packed velocities against those of each sequence alone, and of transformers' own forward.

HALF_PRECISION = 0.1  # the largest relative difference that bf16 rounding explains
NEIGHBOUR = 0.05  # of equal shapes, so nearly all of rounding is equal


class Pi0Adapter(ActionAdapter):
    model: Pi0Policy
    extra_forwards = (*ActionAdapter.extra_forwards, "reference_velocity")

    def preflight(self, layout: Layout, exact: bool) -> None:
        with raise_on_all_ranks(layout.world.host_group):
            check_velocities(self.model, exact)

    def preflight_media(self, engine: Any, batches: Iterable[Any]) -> None:
        """`preflight` had images."""


@torch.no_grad()
def check_velocities(model: Pi0Policy, exact: bool) -> None:
    """Raise unless packed velocities are those of each sequence alone and of transformers' own forward."""
    device = next(model.parameters()).device
    rows = [probe_batch(model, cameras, words, seed=words) for cameras, words in ((1, 3), (2, 6))]
    other = probe_batch(model, 2, 6, seed=1)
    with eager_eval(model):
        packed = _velocity(model, PackedBatch.concat(rows).to(device))
        moved = [row.to(device) for row in rows]
        changed = _velocity(model, PackedBatch.concat([rows[0], other]).to(device))
        alone = torch.cat([_velocity(model, row) for row in moved])
        reference = torch.cat([model.reference_velocity(row) for row in moved])
    if not bool(packed.isfinite().all()):
        raise UserError("pi0 returns non-finite velocities: check its weights for NaN and infinity")
    bound = EXACT if exact else HALF_PRECISION
    for found, wanted, what, limit in (
        (packed[:1], changed[:1], "another neighbour in the pack", EXACT if exact else NEIGHBOUR),
        (packed, alone, "the same sequences alone", bound),
        (packed, reference, "transformers' own forward", bound),
    ):
        difference = float((found - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-6))
        if not difference <= limit:
            raise UserError(
                f"pi0 cannot be trained on packed sequences: its velocities differ from those with {what} by "
                f"{difference:.1e}. Is its config one that transformers' pi0 has other code for?"
            )


def _velocity(model: Pi0Policy, batch: PackedBatch) -> Tensor:
    output: Tensor = model(batch, ["velocity"])["velocity"]
    return output


def probe_batch(
    model: Pi0Policy, cameras: int, words: int, seed: int, draws: int = 2
) -> PackedBatch:
    """One random sequence: `cameras` images and a prompt of `words` tokens, with state, actions and noise."""
    config: Any = model.hf.config
    spec = model.action_spec
    vision = config.vlm_config.vision_config
    image_token = config.vlm_config.image_token_id
    patches = (vision.image_size // vision.patch_size) ** 2
    g = torch.Generator().manual_seed(seed)
    vocab_size = config.vlm_config.text_config.vocab_size
    prompt = torch.randint(min(vocab_size, image_token), (words,), generator=g)
    prompt = torch.where(prompt == image_token, 0, prompt)
    ids = torch.cat([torch.full((cameras * patches,), image_token), prompt])
    side = vision.image_size
    pixels = torch.randn(cameras, vision.num_channels, side, side, generator=g)
    chunk = (1, spec.chunk, spec.action_dim)
    fields = {
        STATE: torch.randn(1, spec.state_dim, generator=g),
        CHUNK: torch.randn(chunk, generator=g),
        MASK: torch.ones(chunk, dtype=torch.bool),
        NOISE: torch.randn(1, draws, *chunk[1:], generator=g),
        TIMES: torch.rand(1, draws, generator=g),
    }
    ones = torch.ones(cameras, dtype=torch.long)
    media = {"pixel_values": Media(pixels, ones, torch.zeros(cameras, dtype=torch.long))}
    no_loss = torch.zeros_like(ids, dtype=torch.bool)
    return PackedBatch.from_sequences([ids], [no_loss], sequence_fields=fields, media=media)
