"""KVCache: keys and values of packed sequences during generation, one entry per attention layer.

Legend: T tokens of a packed batch, S sequences, C capacity in tokens, L cached tokens of the longest sequence,
H query heads, K key/value heads, G query heads per key/value head, d head size, e head size of the values.

transformers' own cache is not used: it has one row per padded sequence. Packed attention gets this object as a keyword
argument of the model's forward. In the first forward (the prompts) it stores what the layers compute; every later
forward has one token per sequence, which attends to all cached tokens of its own sequence: on a GPU by the kernel of
`ops/decode_attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.ops.attn_spec import AttnSpec

if TYPE_CHECKING:
    from mvp_engine.hf.mixers.per_sequence import MixerStates


class _Layer(NamedTuple):
    keys: Tensor  # (S, K, C, d)
    values: Tensor  # (S, K, C, e)


class _Places(NamedTuple):
    """Where the tokens of a forward go in the cache, on the device."""

    rows: Tensor  # the sequence of each token
    columns: Tensor  # its index in the sequence


class KVCache:
    """The cache of the sequences of one batch: first their prompts, then a token of each per forward."""

    def __init__(self, prompt_lengths: list[int], max_new_tokens: int) -> None:
        self.lengths = list(prompt_lengths)  # cached tokens of each sequence
        self.is_prefilled = False
        self._capacity = max(self.lengths, default=0) + max_new_tokens
        self._layers: dict[nn.Module, _Layer] = {}
        self.mixer_states: dict[
            nn.Module, MixerStates
        ] = {}  # of linear attention and state-space layers
        # All layers of a forward share these: a copy to the device per layer would cost more than its attention.
        self._places: _Places | None = None
        self._allowed: dict[int | None, Tensor] = {}  # by window
        self.has_fixed_shapes = False

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def capacity(self) -> int:
        return self._capacity

    def advance(self) -> None:
        """Count the tokens of a forward that has finished: all layers have stored them."""
        self._allowed.clear()
        if not self.has_fixed_shapes:
            added = 1 if self.is_prefilled else 0
            self.is_prefilled = True
            self._set_lengths([length + added for length in self.lengths])

    # ---- Fixed shapes, for CUDA graphs ----------------------------------------------------------------------

    def fix_shapes(self) -> None:
        """From now on forwards read the whole cache, masked, and none of them counts its tokens.

        The caller does: on the device with `advance_on_device` after each forward, on the host with `count_tokens`.
        """
        (layer, *_) = self._layers.values()
        self.has_fixed_shapes = True
        self._places = self._find_places(layer.keys.device)
        self._allowed.clear()

    def free_shapes(self) -> None:
        self.has_fixed_shapes = False
        self._set_lengths(self.lengths)

    @property
    def newest(self) -> Tensor:
        """Where the tokens of the next forward go: the index of each in its sequence, on the device."""
        assert self._places is not None
        return self._places.columns

    def advance_on_device(self) -> None:
        self.newest.add_(1)

    def count_tokens(self, forwards: int) -> None:
        self.lengths = [length + forwards for length in self.lengths]

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences; a sequence may be chosen several times, to continue it in several ways."""
        self.has_fixed_shapes = False
        self._set_lengths([self.lengths[s] for s in sequences])
        index = torch.tensor(sequences)
        for states in self.mixer_states.values():
            states.select(index)
        for module, layer in self._layers.items():
            index = index.to(layer.keys.device)
            self._layers[module] = _Layer(*(part.index_select(0, index) for part in layer))

    def join(self, other: KVCache) -> None:
        """Add the sequences of another cache of the same model, behind those of this one."""
        capacity = max(self._capacity, other._capacity)
        self.reserve(capacity)
        other.reserve(capacity)
        for module, added in other._layers.items():
            parts = (self._layers[module], added) if module in self._layers else (added,)
            self._layers[module] = _Layer(*(torch.cat(both) for both in zip(*parts, strict=True)))
        for module, states in other.mixer_states.items():
            if module in self.mixer_states:
                order = list(range(len(self.lengths) + len(other.lengths)))
                states = states.stack([self.mixer_states[module], states], order)
            self.mixer_states[module] = states
        self.is_prefilled = True
        self._set_lengths(self.lengths + other.lengths)

    def reserve(self, capacity: int) -> None:
        """Make room for so many tokens of each sequence."""
        more = capacity - self._capacity
        if more <= 0:
            return
        self._capacity = capacity
        for module, layer in self._layers.items():
            self._layers[module] = _Layer(*(F.pad(part, (0, 0, 0, more)) for part in layer))

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._places = None
        self._allowed.clear()

    def store_prompts(self, module: nn.Module, k_KTd: Tensor, v_KTe: Tensor) -> None:
        """Copy the keys and values of a layer. Tokens behind those of the prompts belong to dummies."""
        empty = []
        for packed in (k_KTd, v_KTe):
            heads, _, size = packed.shape
            empty.append(packed.new_zeros(len(self.lengths), heads, self._capacity, size))
        self._layers[module] = _Layer(*empty)
        self._write(module, k_KTd, v_KTe)

    def attend(
        self, module: nn.Module, q_HSd: Tensor, k_KSd: Tensor, v_KSe: Tensor, spec: AttnSpec
    ) -> Tensor:
        """Store the next token of each sequence; its attention to all cached ones, (H, S, e).

        It is text, so of a mask only the window matters.
        """
        self._write(module, k_KSd, v_KSe)
        layer = self._layers[module]
        if q_HSd.is_cuda:
            from mvp_engine.ops.decode_attention import decode_attention

            return decode_attention(
                q_HSd,
                *layer,
                self.newest,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks_H=spec.sinks,
            )
        return attend_to_cache(
            q_HSd,
            layer.keys[:, :, : self._length],
            layer.values[:, :, : self._length],
            self._allowed_tokens(spec.window),
            scale=spec.scale,
            softcap=spec.softcap,
            sinks_H=spec.sinks,
        )

    @property
    def _length(self) -> int:
        """How many cached tokens the newest ones attend to, masked where a sequence is shorter."""
        return self._capacity if self.has_fixed_shapes else self.max_length + 1

    def _write(self, module: nn.Module, k_KTd: Tensor, v_KTe: Tensor) -> None:
        if self._places is None:
            self._places = self._find_places(k_KTd.device)
        rows, columns = self._places
        for part, packed in zip(self._layers[module], (k_KTd, v_KTe), strict=True):
            part[rows, :, columns] = packed[:, : len(rows)].transpose(0, 1)

    def _find_places(self, device: torch.device) -> _Places:
        lengths_S = torch.tensor(self.lengths)
        rows_S = torch.arange(len(lengths_S))
        if self.is_prefilled:
            return _Places(rows_S.to(device), lengths_S.to(device))
        rows_T = rows_S.repeat_interleave(lengths_S)
        starts_S = lengths_S.cumsum(0) - lengths_S
        columns_T = torch.arange(len(rows_T)) - starts_S[rows_T]
        return _Places(rows_T.to(device), columns_T.to(device))

    def _allowed_tokens(self, window: int | None) -> Tensor:
        """Which cached tokens the newest token of each sequence attends to, (S, L)."""
        if window not in self._allowed:
            assert self._places is not None
            position_S1 = self._places.columns[:, None]
            index_1L = torch.arange(self._length, device=position_S1.device)[None]
            allowed_SL = index_1L <= position_S1
            if window is not None:
                allowed_SL &= index_1L > position_S1 - window
            self._allowed[window] = allowed_SL
        return self._allowed[window]


def attend_to_cache(
    q_HSd: Tensor,
    k_SKLd: Tensor,
    v_SKLe: Tensor,
    allowed_SL: Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of one query per sequence to its cached tokens, (H, S, e), in plain PyTorch."""
    heads, sequences, size = q_HSd.shape
    kv_heads = k_SKLd.shape[1]
    q_SKGd = q_HSd.transpose(0, 1).reshape(sequences, kv_heads, heads // kv_heads, size)
    scores_SKGL = (q_SKGd @ k_SKLd.transpose(-1, -2)).float() * (scale or size**-0.5)
    if softcap is not None:
        scores_SKGL = softcap * torch.tanh(scores_SKGL / softcap)
    scores_SKGL = scores_SKGL.masked_fill(~allowed_SL[:, None, None], float("-inf"))
    if sinks_H is not None:
        # One more logit per head takes its share of the probability and adds no value.
        sinks_SKG1 = sinks_H.float().view(1, kv_heads, -1, 1).expand(sequences, -1, -1, 1)
        scores_SKGL = torch.cat([scores_SKGL, sinks_SKG1], dim=-1)
    probs_SKGL = scores_SKGL.softmax(-1)[..., : k_SKLd.shape[2]].to(v_SKLe.dtype)
    out_SKGe = probs_SKGL @ v_SKLe
    return out_SKGe.reshape(sequences, heads, -1).transpose(0, 1)
