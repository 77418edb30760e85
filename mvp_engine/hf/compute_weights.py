"""ComputeWeights: bf16 or FP8 copies of float32 weights, cast once per step instead of once per micro-batch
(`model.cast_weights_once`).

Under autocast each linear layer casts its weight in every micro-batch, and its gradient back to float32. Here the
blocks run on copies that are parameters themselves, and a hook adds their bf16 gradients to the float32 gradients of
the masters. The sums are bit-equal: bf16 to float32 is exact, and the order is the same. Outside of forward and
backward the model has its masters, the only parameters that the optimizer, checkpoints and evaluations know.

FP8 layers keep their masters, and compute with FP8 values of them: by rows, and by rows of the transposed matrix, 2
bytes per weight as well. The gradient goes to a tensor of the copy that has no memory of its own (`fp8_weights.py`).
Frozen weights have FP8 values, too, which are kept from step to step until other weights are loaded.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError
from mvp_engine.hf import experts
from mvp_engine.hf.fp8_weights import empty_copy, fp8_places, quantize_weights, set_quantized
from mvp_engine.hf.lora import READ_DIRECTLY
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import blocks_by_part
from mvp_engine.ops.fp8 import Fp8Linear, Fp8Weight

ENCODERS = ("vision", "audio", "projector")  # parts that run on media


class ComputeWeights:
    def __init__(self, model: nn.Module) -> None:
        found = cast_once(model)
        in_fp8 = dict.fromkeys(fp8_places(model))
        frozen = [(one, name) for one, name in in_fp8 if not one.get_parameter(name).requires_grad]
        self.fp8_places = [*(place for place in found if place in in_fp8), *frozen]
        self.places = [place for place in found if place not in in_fp8]
        self.fp8_masters = [module.get_parameter(name) for module, name in self.fp8_places]
        self.masters = [module.get_parameter(name) for module, name in self.places]
        self._copies: list[nn.Parameter] = []
        self._fp8_copies: list[Fp8Weight] = []
        self._frozen_versions: dict[nn.Parameter, int] = {}  # of the weights that were quantized
        if not (found or frozen):
            raise UserError(
                f"model.cast_weights_once: no block of {type(model).__name__} has trainable float32 weights that "
                "autocast casts, of linear layers or stacked experts, or frozen ones in FP8, so nothing would change. "
                "Leave it out"
            )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the blocks have the copies, with the values that the masters have at its start."""
        if not (self._copies or self._fp8_copies):
            self._copies = [_copy_of(master) for master in self.masters]
            self._fp8_copies = [_fp8_copy_of(master) for master in self.fp8_masters]
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_([*self._copies], [*self.masters])
        self._quantize()
        self._set(self._copies, self._fp8_copies)
        try:
            yield
        finally:
            self._set(self.masters, [None] * len(self.fp8_places))

    def release(self) -> None:
        """Free the memory of the copies until they are needed again."""
        self._copies = []
        self._fp8_copies = []
        self._frozen_versions = {}

    def _quantize(self) -> None:
        """Quantize the trainable weights, and the frozen ones that changed; not seen is a write to `param.data`."""
        found = self._frozen_versions
        pairs = zip(self._fp8_copies, self.fp8_masters, strict=True)
        stale = [(copy, one) for copy, one in pairs if found.get(one) != one._version]
        quantize_weights([copy for copy, _ in stale], [master for _, master in stale])
        # Optimizers may change weights in kernels of their own, which count no version: trainable ones are left out.
        frozen = [master for master in self.fp8_masters if not master.requires_grad]
        self._frozen_versions = {master: master._version for master in frozen}

    def _set(self, params: list[nn.Parameter], fp8: Sequence[Fp8Weight | None]) -> None:
        for (module, name), param in zip(self.places, params, strict=True):
            module._parameters[name] = param
        set_quantized(self.fp8_places, fp8)


def _copy_of(master: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=torch.bfloat16))
    copy.register_post_accumulate_grad_hook(_add_to(master))
    return copy


def _fp8_copy_of(master: nn.Parameter) -> Fp8Weight:
    copy = empty_copy(master)
    if master.requires_grad:
        copy.leaf.register_post_accumulate_grad_hook(_add_to(master))
    return copy


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move_grad(copy: Tensor) -> None:
        grad = copy.grad
        copy.grad = None
        assert grad is not None
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad.add_(grad)  # reads bf16, without a float32 temporary

    return move_grad


def cast_once(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules and names of the parameters that have copies: trainable float32 matrices of blocks that autocast casts.

    What may run more than once in a micro-batch has none: its gradients would be summed in bf16, where compiled blocks
    sum them in float32. Those are parameters in several places, and encoders, which run on images and on videos.
    """
    uses: Counter[nn.Parameter] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        uses.update(param for param in module._parameters.values() if param is not None)
    stacked = set(experts.modules(model).values())
    found: dict[tuple[nn.Module, str], None] = {}
    for block, part in blocks_by_part(model):
        if isinstance(model, PackedModel) and part in ENCODERS:
            continue
        for name, module in block.named_modules():
            if not name or name.rpartition(".")[2] in READ_DIRECTLY:  # a block is no head
                continue
            for owner in _cast_modules(module, stacked):
                params = owner.named_parameters(recurse=False)
                names = [key for key, param in params if uses[param] == 1 and _has_copy(param)]
                found |= dict.fromkeys((owner, key) for key in names)
    return list(found)


def _cast_modules(module: nn.Module, stacked: set[nn.Module]) -> list[nn.Module]:
    """The modules of which autocast, or `hf/experts.py` itself, casts all matrices."""
    is_linear = type(module).forward in (nn.Linear.forward, Fp8Linear.forward)  # not of 4 bits
    if is_linear and "forward" not in vars(module):
        return [module]
    if module in stacked and experts.sizes_fit(module):
        return [module, *experts.adapters(module)]
    return []


def _has_copy(param: nn.Parameter) -> bool:
    is_matrix = param.requires_grad and param.dtype == torch.float32 and param.ndim >= 2
    return is_matrix and not (param._backward_hooks or param._post_accumulate_grad_hooks)
