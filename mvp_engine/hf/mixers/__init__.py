"""Mixers: layers that carry a state from token to token, on packed sequences (linear attention, state space, short
convolutions), and sparse attention.

A mixer passes a convolution window or a recurrent state from each token to the next. On a packed batch the state must
restart at every sequence boundary. `kinds.py` finds the mixers of a model by what their forward does, not by a list of
models; `PackedMixers` changes the forward of these *instances*.
"""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "kernels": "KERNELS describe load mixer_error reference_only",
    "kinds": "mixers_of state_flops",
    "packed_mixers": "PackedMixers",
    "per_sequence": "MixerStates",
}
