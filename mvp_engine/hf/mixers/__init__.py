"""Mixers: layers that carry a state from token to token, on packed sequences (linear attention, state space, short
convolutions).

A mixer passes a convolution window or a recurrent state from each token to the next. On a packed batch the state must
restart at every sequence boundary. `mixers_of` finds the mixers of a model by what their forward does, not by a list of
models; `PackedMixers` changes the forward of these *instances*.
"""

from __future__ import annotations

from mvp_engine.hf.mixers.kinds import mixers_of, state_flops
from mvp_engine.hf.mixers.packed_mixers import PackedMixers

__all__ = ["PackedMixers", "mixers_of", "state_flops"]
