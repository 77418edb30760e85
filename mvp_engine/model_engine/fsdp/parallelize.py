"""parallelize_model: a model is put on its layout, in the order that FSDP2 needs.

1. freeze parameters                        4. FP8, pipeline stages
2. quantize or tensor parallel              5. activation checkpointing, torch.compile, by block
3. expert, context and Ulysses parallel     6. FSDP2

What changes the forward of a block comes before FSDP. A model on the meta device gets its weights after that, each rank
its own shards (`init_weights.py`), so that no rank ever holds the whole model.

Inputs of checkpointed blocks that wait for backward on the host (`model.activation_checkpointing=offload`).

    compute     block 1        block 2        block 3     ...     backward of 3    backward of 2    backward of 1
    side stream  input 1 to host  input 2 to host         ...                      input 1 to device

Copies run on one side stream, so that they are in order among themselves: a host buffer is written again only after it
was read. When a block starts, the input of the block before it leaves, and the one before that has left: the compute
stream waits for that copy, and only then the memory is freed, in its own order. (`record_stream` would free it when the
*host* sees the copy done. The host is far ahead: nothing would be freed in time.) The inputs of the last two blocks
are still there when backward begins. When backward of a block starts, the input of the block before it comes back.

What is kept for backward belongs to the autograd graph: an interrupted forward drops the graph, and its buffers are
free again. On a CPU the same code copies at once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import os
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mvp_engine.config.schema import PARTS
from mvp_engine.distributed import Layout
from mvp_engine.distributed.data_parallel import apply_fsdp
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.fp8_layers import use_fp8
from mvp_engine.hf.model.adapter import ModelAdapter
from mvp_engine.hf.model.input_hooks import mark_sizes
from mvp_engine.hf.model.model_parts import blocks_by_part, by_part, matching, norms_by_part
from mvp_engine.model_engine.base import DTYPES, Settings
from mvp_engine.model_engine.fsdp.compile import (
    allow_graphs,
    compile_arguments,
    compile_backends,
    copy_views,
    use_cache,
)
from mvp_engine.model_engine.fsdp.lockstep import run_dummies_along
from mvp_engine.ops import fp8, side_stream
from mvp_engine.ops.host_memory import GIB, available_host_memory, pinned_zeros

KEY = "model.activation_checkpointing=offload"
FIX = "Free host memory, set smaller packs (pack_tokens), or model.activation_checkpointing=full"
SMALL = 2**20  # bytes; smaller inputs stay on the device
STEPS = 8  # sizes of buffers between two powers of two: packs of nearly the same size share them
_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, HostInputs] = weakref.WeakKeyDictionary()


def host_bytes(model: nn.Module) -> int:
    """Bytes of the buffers on the host that the inputs of a model's blocks have used."""
    return _OF_MODEL[model].host_bytes if model in _OF_MODEL else 0


class HostInputs:
    """The inputs of a model's blocks on the host, in buffers that later micro-batches use again."""

    def __init__(self, model: nn.Module) -> None:
        _OF_MODEL[model] = self
        self.host_bytes = 0  # of all buffers
        self._free: list[Tensor] = []  # by size
        # Buffers of inputs that are gone, at any moment and in any thread: the next `take` sorts them in.
        self._returned: list[Tensor] = []
        self._stream: side_stream.Stream = None
        self._recent: list[weakref.ref[_Input]] = []  # of the last two blocks

    def offloading(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a checkpointed block whose input waits on the host."""

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            hidden = self._hidden_states((*args, *kwargs.values()))
            if hidden is None:
                return call(*args, **kwargs)
            self._move_earlier_inputs()
            found = [_Input(self, hidden, self._recent[-1:])]
            del hidden
            # Autograd calls this with all that it saves: also weights, and the input with other shapes.
            with saved_tensors_hooks(lambda saved: found[0].pack(saved), _unpack):
                result = call(*args, **kwargs)
            saved = weakref.ref(found.pop())
            if saved() is not None:
                self._recent.append(saved)
            return result

        return offloaded

    def _hidden_states(self, values: tuple[Any, ...]) -> Tensor | None:
        """The first large argument that needs gradients. Later ones, such as an encoder's output, are the same for all
        blocks."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        for value in values:
            # Not of subclasses: DTensors, and fake tensors of `mvp plan`.
            if type(value) is not Tensor or value.grad_fn is None or value.nbytes < SMALL:
                continue
            if value.is_floating_point() and value.is_contiguous():
                return value
        return None

    def _move_earlier_inputs(self) -> None:
        earlier = [one for ref in self._recent if (one := ref()) is not None]
        for one in earlier[:-1]:
            one.free_on_device()
        for one in earlier[-1:]:
            one.copy_to_host()
        self._recent = [weakref.ref(one) for one in earlier[-1:]]

    def stream(self, device: torch.device) -> side_stream.Stream:
        if self._stream is None:
            self._stream = side_stream.new_stream(device)
        return self._stream

    # ---- Buffers ----------------------------------------------------------------------------------------------------

    def take(self, size: int, device: torch.device) -> Tensor:
        """The smallest free buffer of at least `size` bytes; a new one takes the place of one that is too small."""
        while self._returned:
            insort(self._free, self._returned.pop(), key=len)
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self.host_bytes -= len(self._free.pop())
        step = max(1, 2 ** (size - 1).bit_length() // (2 * STEPS))
        size = -(-size // step) * step
        buffer = self._allocate(size, device)
        self.host_bytes += size
        return buffer

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = available_host_memory()
        if available is not None and ranks * size > available:
            raise UserError(
                f"{KEY}: a rank has {self.host_bytes / GIB:.1f} GiB of inputs of blocks on the host, and "
                f"{available / GIB:.1f} GiB are left for more on {ranks} ranks of this machine. {FIX}"
            )
        return pinned_zeros((size,), torch.uint8, KEY, FIX)

    def give_back(self, buffer: Tensor) -> None:
        self._returned.append(buffer)


class _Input:
    """The input of one call of a block: on the device, on the host, or on both."""

    def __init__(
        self, inputs: HostInputs, hidden: Tensor, before: list[weakref.ref[_Input]]
    ) -> None:
        self.buffer: Tensor | None = None  # on the host
        self.is_copied: side_stream.Event = None  # the compute stream has yet to wait for it
        self.inputs = inputs
        self.before = before  # of the block before this one
        self.device = hidden.device
        self.dtype = hidden.dtype
        self.shape = hidden.shape
        self.storage = hidden.untyped_storage()._cdata
        self.offset = hidden.storage_offset()
        self.on_device: Tensor | None = hidden.detach()
        self.version = hidden._version  # which the detached tensor shares
        # Of the memory on the device. Garbage collection may run `__del__` on the side stream, or in another thread.
        self.compute_stream = side_stream.current_stream(self.device)
        self.is_computed = side_stream.event(self.device)
        self.num_packed = 0  # a graph may save it with several shapes
        self.num_used = 0

    def pack(self, saved: Tensor) -> Any:
        """What autograd saves: itself, unless it is this input."""
        if type(saved) is not Tensor or saved.dtype != self.dtype or not saved.is_contiguous():
            return saved
        if saved.untyped_storage()._cdata != self.storage:
            return saved
        # Another argument may be another slice of the same storage.
        if saved.storage_offset() != self.offset or saved.numel() != self.shape.numel():
            return saved
        self.num_packed += 1
        return _Packed(self, saved.shape)

    def copy_to_host(self) -> None:
        if self.buffer is not None or self.on_device is None:
            return
        self.buffer = self.inputs.take(self.on_device.nbytes, self.device)
        with side_stream.on(self.inputs.stream(self.device), self.is_computed):
            self._host().copy_(self.on_device, non_blocking=True)
            self.is_copied = side_stream.event(self.device)

    def free_on_device(self) -> None:
        if self.buffer is None:  # its copy failed
            return
        self._check_unchanged()
        self._wait()
        self.on_device = None

    def copy_to_device(self) -> None:
        if self.on_device is not None:
            return
        # Memory of the compute stream: what used it before is done at the event.
        on_device = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with side_stream.on(self.inputs.stream(self.device), side_stream.event(self.device)):
            on_device.copy_(self._host(), non_blocking=True)
            self.is_copied = side_stream.event(self.device)
        self.on_device = on_device
        self.version = on_device._version

    def use(self) -> Tensor:
        """The input, for backward; that of the block before it is copied to the device meanwhile."""
        self.copy_to_device()
        self._check_unchanged()
        self._wait()
        found = self.on_device
        assert found is not None
        self.num_used += 1
        is_last = self.num_used % self.num_packed == 0
        if self.buffer is not None and is_last:  # a second backward would copy it again
            self.on_device = None
        for ref in self.before:
            if (before := ref()) is not None:
                before.copy_to_device()
        return found

    def _host(self) -> Tensor:
        assert self.buffer is not None
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:size].view(self.dtype).view(self.shape)

    def _wait(self) -> None:
        side_stream.wait(self.is_copied, self.compute_stream)
        self.is_copied = None

    def _check_unchanged(self) -> None:
        if self.on_device is not None and self.on_device._version != self.version:
            raise UserError(
                f"{KEY}: the input of a block was changed in place after the block had read it, and backward needs it. "
                "Change it out of place (x = x + y for x += y)"
            )

    def __del__(self) -> None:
        self._wait()  # before the memory on the device is freed
        if self.buffer is not None:
            self.inputs.give_back(self.buffer)


class _Packed(NamedTuple):
    """What the autograd graph holds in place of the input of a block."""

    kept: _Input
    shape: torch.Size


def _unpack(packed: Any) -> Any:
    return packed.kept.use().view(packed.shape) if isinstance(packed, _Packed) else packed


HALF_PRECISION = (torch.bfloat16, torch.float16)


def parallelize_model(
    model: nn.Module, adapter: ModelAdapter, layout: Layout, settings: Settings
) -> nn.Module | None:
    """Returns a copy of a model on the meta device, made before it was sharded: its weights are still to come."""
    world = layout.world
    dtype = DTYPES[settings.precision]
    backends = compile_backends(model, settings.compile, layout, adapter.compiles_by_default)
    if any(backends.values()):
        allow_graphs()
    if "inductor" in backends.values():
        use_cache()
    fp8_parts = _fp8_parts(model, layout, settings)
    freeze(model, settings.freeze)
    adapter.before_parallelize(dtype)
    on_meta = any(param.is_meta for param in model.parameters())
    skeleton = copy.deepcopy(model) if on_meta else None
    if not on_meta:
        _to_master_precision(model, adapter, settings)
        model.to(world.device)
        world.broadcast_from_rank0_([*model.parameters(), *model.buffers()])
    if settings.quantize:
        _check_quantize(settings, layout, fp8_parts)
        adapter.quantize(settings.quantize, dtype)
    if layout.tensor_mesh is not None:
        adapter.apply_tensor_parallel(layout.tensor_mesh)
    experts: list[nn.Module] = []
    if layout.expert_mesh is not None:
        experts = adapter.apply_expert_parallel(layout.expert_mesh)
    if layout.sequence_groups is not None:
        adapter.enable_sequence_parallel(layout.sequence_groups, layout.tensor)
    adapter.replace_layers(layout, settings)
    if settings.experts.is_used:  # before the cut: it counts the layers of all stages
        adapter.balance_experts(settings.experts, world.device)
    # Before the cut: it tests all stages alike.
    use_fp8(model, fp8_parts, world.device)
    if layout.pipeline > 1:
        adapter.cut_stage(StageLink(layout), skeleton)
        held = set(model.modules())
        experts = [module for module in experts if module in held]
    _change_blocks(model, settings, backends)
    if layout.shard_mesh is not None:
        meshes = layout.shard_mesh, dtype, experts, layout.expert_shard_mesh
        apply_fsdp(model, *meshes, layout.reshard)
        for name in adapter.extra_forwards:
            register_fsdp_forward_method(model, name)
    if layout.pipeline > 1:
        adapter.send_stage_outputs()
    if layout.shard_mesh is not None:
        run_dummies_along(model)
    return skeleton


def _change_blocks(
    model: nn.Module,
    settings: Settings,
    backends: Mapping[str, str | None],
) -> None:
    """Activation checkpointing and compilation of each block, in this order; last norms are compiled, too."""
    setting = settings.activation_checkpointing
    checkpointing = by_part(model, setting, "model.activation_checkpointing")
    host_inputs = HostInputs(model)
    for block, part in blocks_by_part(model):
        mode = checkpointing.get(part, "none")
        backend = backends.get(part)
        if mode != "none":
            checkpoint_block(block, mode, backend)
        if backend:
            _compile(block, backend, host_inputs if mode == "offload" else None)
        elif mode == "offload":
            block.forward = host_inputs.offloading(block.forward)
    for norm, part in norms_by_part(model):  # uncompiled, it reads and writes its tokens ten times
        if backend := backends.get(part):
            _compile(norm, backend)


def _compile(module: nn.Module, backend: str, host_inputs: HostInputs | None = None) -> None:
    module.compile(**compile_arguments(backend))
    if host_inputs is not None:  # around the graph, which saves the block's input
        module._compiled_call_impl = host_inputs.offloading(module._compiled_call_impl)  # type: ignore[arg-type]
    mark_sizes(module)
    copy_views(module)  # last, so that it is called first: sizes are marked on what the block gets


def _fp8_parts(model: nn.Module, layout: Layout, settings: Settings) -> Mapping[str, bool | str]:
    """Which parts run their linear layers and experts in FP8; "all": weight gradients too."""
    parts: Mapping[str, bool | str] = by_part(model, settings.fp8, "model.fp8")
    if any(parts.values()):
        if settings.precision != "bf16":
            raise UserError(
                f"model.fp8 is for bf16, not for {settings.precision}: set train.precision=bf16, or leave it out"
            )
        if layout.tensor_mesh is not None:
            raise UserError(
                "model.fp8 does not support parallel.tensor > 1: set parallel.shard instead"
            )
        fp8.check(layout.world.device)
    return parts


def _check_quantize(
    settings: Settings, layout: Layout, fp8_parts: Mapping[str, bool | str]
) -> None:
    if layout.tensor_mesh is not None:
        raise UserError(
            "model.quantize does not support parallel.tensor > 1: set parallel.shard instead"
        )
    both = [part for part in settings.quantize if fp8_parts.get(part, False)]
    if both:
        raise UserError(
            f"model.quantize and model.fp8 both name {both[0]}: a layer is one or the other. Remove one of them"
        )


def _to_master_precision(model: nn.Module, adapter: ModelAdapter, settings: Settings) -> None:
    """Keep trainable tensors in float32, whatever the model came in; frozen ones only if computed with in fp32."""
    halves = [param.dtype for param in model.parameters() if param.dtype in HALF_PRECISION]
    if halves:
        adapter.set_export_dtype(halves[0])
    for tensor in [*model.parameters(), *model.buffers()]:
        wanted = tensor.requires_grad or settings.precision == "fp32"
        if tensor.dtype in HALF_PRECISION and wanted:
            tensor.data = tensor.data.float()


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze what `patterns` name, except for what those with a `!` name: ["*", "!projector"] trains a part alone."""
    frozen: set[str] = set()
    for pattern in sorted(patterns, key=lambda one: one.startswith("!")):
        part = pattern.removeprefix("!")
        # A part is what the model consists of; its adapters stay trainable.
        names = {
            name
            for name in matching(model, part, "model.freeze")
            if part not in (*PARTS, "*") or ".lora_" not in name
        }
        frozen = frozen - names if part != pattern else frozen | names
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


# Activation checkpointing of blocks: full, or with kept outputs, of GEMMs and attention (selective) or of attention.
#
# `offload` is full, and what a block saves goes to the host (`offload` below).

LOGGER = logging.getLogger("mvp_engine")

# Outputs of these operators are kept: they take longest to compute. Names with an underscore match any operator that
# contains them. All others are cheap, or make up most of the memory.
_ATTENTION = {
    "_scaled_dot_product",
    "_flash_attention",
    "_cudnn_attention",
    "_varlen_attn",
    "ragged_attention",
    "short_attention",
}
_GEMMS = {"mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm", "nf4_matmul"}
# A GEMM with so many times more columns than rows (a LoRA adapter's second matrix) is cheap for the size of its output.
_MAX_ASPECT_RATIO = 8
_NUM_KEPT = [0]  # outputs, in all forwards


def _policy(kinds: set[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(getattr(op, "overloadpacket", op), "__name__", ""))
    kept = any(name == kind or (kind[0] == "_" and kind in name) for kind in kinds)
    if kept and name in ("mm", "addmm"):
        rows, columns = args[-1].shape
        kept = columns <= _MAX_ASPECT_RATIO * rows
    _NUM_KEPT[0] += kept
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _ATTENTION | _GEMMS))


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _ATTENTION))


def _compiled_attention_contexts() -> Any:
    """No policy where a block runs uncompiled although it is to be compiled: see `checkpoint_block`."""
    if TracingContext.try_get() is None:
        return noop_context_fn()
    return _attention_contexts()


_CONTEXTS = {"selective": _selective_contexts, "attention": _attention_contexts}
# The identity of a policy in the compile cache: without it, each start traces the graphs again. It changes with this
# file.
_FILE_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
for _contexts in (_selective_contexts, _attention_contexts, _compiled_attention_contexts):
    _contexts.cache_hash = _contexts.__name__ + _FILE_HASH  # type: ignore[attr-defined]


def checkpoint_block(block: nn.Module, mode: str, backend: str | None) -> None:
    """Replace the forward of `block` by one that saves its inputs, and the outputs that `mode` keeps, for backward.

    A block that torch compiles with `backend` but that arrives here uncompiled has attention with a graph break: it
    loops over sequences on the host, or is FlexAttention, which is compiled separately. torch compiles around such
    attention, but not inside of a checkpointed function. So the function is compiled inside. Selective checkpointing
    cannot do that: a compiled function would hide the operators that the policy selects. `attention` can, because
    such attention is no operator, and nothing is kept.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if mode in _CONTEXTS:
        options["context_fn"] = _CONTEXTS[mode]
    if backend and mode == "attention":
        options["context_fn"] = _compiled_attention_contexts
    name = type(block).__name__
    forward = block.forward
    inner = forward
    if backend and mode != "selective":
        inner = torch.compile(forward, **compile_arguments(backend))

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if mode in _CONTEXTS and backend:
            _warn_of_attention(name, mode)
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if mode in _CONTEXTS and "has been mutated" in str(error):
                raise UserError(
                    f"model.activation_checkpointing={mode} keeps the outputs of some operators; "
                    f"{name} changes one of them in place. Set model.activation_checkpointing=full, or "
                    "change it out of place (nn.ReLU() for nn.ReLU(inplace=True), x = x + y for x += y)"
                ) from error
            raise

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(run, *args, **options, **kwargs)
        # torch saves positional arguments only; a closure would hold the others, where `offload` does not see them.
        named = {key: value for key, value in kwargs.items() if _needs_grad(value)}
        others = {key: value for key, value in kwargs.items() if key not in named}
        names = tuple(named)
        split = len(args)

        def positional(*values: Any) -> Any:
            return run(*values[:split], **dict(zip(names, values[split:], strict=True)), **others)

        before = _NUM_KEPT[0]
        with disable_autocast_cache() if mode in _CONTEXTS else contextlib.nullcontext():
            result = checkpoint(positional, *args, *named.values(), **options)
        if mode == "attention" and not backend and _NUM_KEPT[0] == before:
            _warn_of_attention(name, mode)
        return result

    block.forward = checkpointed


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@contextlib.contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Make autocast cast weights in every use.

    A block that runs twice in a step (on images and on videos) would reuse the weights cast the first time. The second
    run in backward casts them itself, and a policy would see one operator too many.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_ATTENTION_IS_NO_OPERATOR = {
    "selective": "%s runs uncompiled: its attention loops over sequences (in fp32) or is FlexAttention (for what other "
    "kernels lack), and torch does not compile around those with model.activation_checkpointing=selective. "
    "Set model.activation_checkpointing=full, or model.compile=null",
    "attention": "%s keeps nothing with model.activation_checkpointing=attention, as with full: its attention or mixer "
    "loops over sequences (attention in fp32) or is FlexAttention (for what other kernels lack). If all blocks do, set "
    "model.activation_checkpointing=full",
}


@functools.cache
def _warn_of_attention(name: str, mode: str) -> None:
    LOGGER.warning(_ATTENTION_IS_NO_OPERATOR[mode], name)
