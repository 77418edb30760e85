"""Attention kernels that torch.compile must not trace: a compiled block breaks its graph around them.

The reference loops over sequences, so a traced one would be recompiled for each number of sequences. FlexAttention is
compiled on its own, for its own padded sizes. Outside of a compiled block the wrappers only call the function, so
compiled and uncompiled engines share them. Importing this module imports torch._dynamo (half a second).
"""

from __future__ import annotations

import torch

from mvp_engine.ops.flex_attention import flex_varlen_attention
from mvp_engine.ops.reference_attention import reference_attention

untraced_flex_attention = torch.compiler.disable(flex_varlen_attention)
untraced_reference_attention = torch.compiler.disable(reference_attention)
