"""ActionModel: cameras, an instruction and a state in, a chunk of actions out. The base class of action heads.

Legend: S sequences, N noise draws, C steps of a chunk, A action dimensions, Q state dimensions, T prefix tokens.

A sequence of the batch is a *prefix*: images and prompt. What belongs to the actions are per-sequence fields whose
names begin with `action_`. Two heads exist: `pi0.py` (flow matching with an expert that reads the prefix's keys and
values) and `chunk_regressor.py` (parallel decoding on any multimodal language model, L1 loss). A sequence without
actions, a row of a vision-language data set, has an `action_mask` of zeros and labels of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.sequence_parallel import SequenceGroups
from mvp_engine.errors import UserError
from mvp_engine.hf.media import media_features
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.hf.model.auto_model import media_inputs
from mvp_engine.hf.model.flop_costs import FlopCosts, Work
from mvp_engine.hf.model.packed_model import Outputs, PackedModel
from mvp_engine.kit.actions.plugin import ACTION_SIZES, CHUNK, MASK, NOISE, STATE, TIMES
from mvp_engine.model_engine import ModelEngine
from mvp_engine.model_engine.fsdp.engine import PackedModelEngine

if TYPE_CHECKING:
    from mvp_engine.hf.model.kv_cache import KVCache
    from mvp_engine.hf.weights.export import Target

LENGTH_MULTIPLE = 128  # of lengths that are part of compiled blocks
ACTION_OUTPUTS = ("action_losses", "velocity", "actions")


@dataclass(frozen=True)
class ActionSpec:
    """The sizes of a model's actions."""

    chunk: int
    action_dim: int
    state_dim: int
    kind: str  # "flow": noise and times are data; "regression": neither is read
    num_steps: int = 1  # Euler steps of `actions`, unless a call says otherwise

    @classmethod
    def of(cls, config: Any, kind: str) -> ActionSpec:
        missing = [
            name for name in ACTION_SIZES if not isinstance(getattr(config, name, None), int)
        ]
        if missing:
            raise UserError(
                f"model.type=action_model: the config of {config.model_type} has no {', '.join(missing)}. Set "
                f"{' '.join(f'model.config.{name}=N' for name in missing)}"
            )
        steps = int(getattr(config, "num_inference_steps", 1))
        return cls(config.chunk_size, config.max_action_dim, config.max_state_dim, kind, steps)


class ActionModel(PackedModel):
    """A model of actions. Its outputs, next to those of text:

    - `action_losses` (S, C, A): float32, of each entry; 0 where `action_mask` is False
    - `actions` (S, C, A): float32, normalized as the training data were
    - `velocity` (S, N, C, A): of flow heads, at the noise and times of the batch
    """

    model_type = "action_model"
    plan_facts = "mvp_engine.kit.actions.costs:ActionFacts"
    action_spec: ActionSpec
    _steps: int | None = None  # of the forward that runs, as is `_noisy`
    _noisy: Tensor | None = None

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """The head that fits the config: pi0, or a chunk regressor on a multimodal language model."""
        from mvp_engine.kit.actions.chunk_regressor import ChunkRegressor
        from mvp_engine.kit.actions.pi0 import Pi0Policy

        if config.model_type == "pi0":
            return Pi0Policy.build(config)
        return ChunkRegressor.build(config)

    def engine_adapter(self) -> HFAdapter:
        return ActionAdapter(self)

    def export_target(self, dtype: torch.dtype | None = None) -> Target:
        use = "# act.py does the rest: Policy.from_pretrained(folder).act(images, state, task)\n"
        return replace(super().export_target(dtype), use=use)

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int = 1) -> None:
        raise UserError(
            f"{groups.keys} > 1 does not support model.type=action_model, whose sequences are short: set "
            f"{groups.keys}=1 and parallel.shard"
        )

    def forward(
        self,
        batch: PackedBatch,
        outputs: Iterable[str],
        kv_cache: KVCache | None = None,
        temperature: float | None = None,
        steps: int | None = None,
        noisy: Tensor | None = None,
    ) -> Outputs:
        """Outputs by name. `steps`: Euler steps of `actions`, by default those of the config.

        `noisy` (S, N, C, A): where a flow head computes `velocity`, by default on the straight line from the actions of
        the batch to its noise.
        """
        if kv_cache is not None or temperature is not None:
            raise UserError("an action model has no KV cache and no temperature: leave them out")
        if noisy is not None and self.action_spec.kind != "flow":
            raise UserError("noisy: only a flow head (pi0) reads noisy actions: leave it out")
        self._steps = steps
        self._noisy = noisy
        try:
            return super().forward(batch, outputs)
        finally:
            self._steps = None
            self._noisy = None

    @property
    def text_parameters(self) -> set[str]:
        """Parameters that only text outputs use: without rows of text they get no gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define text_parameters")

    def num_draws(self, batch: PackedBatch) -> int:
        """How many chunks are decoded behind each prefix."""
        return 1

    def num_suffix_rows(self, batch: PackedBatch) -> int:
        """Tokens of states and chunks."""
        return batch.num_sequences * (1 + self.num_draws(batch) * self.action_spec.chunk)

    def other_work(self, costs: FlopCosts, batch: PackedBatch) -> Iterator[Work]:
        """The tokens behind the prefixes, and pairs of one and a token that it attends to."""
        lengths_S = batch.cu_seqlens.diff().double()
        chunk = self.action_spec.chunk
        pairs_S = (lengths_S + 1) + self.num_draws(batch) * chunk * (lengths_S + 1 + chunk)
        yield "action", self.num_suffix_rows(batch), None
        yield "action", pairs_S.sum(), costs.pairs["action", None]

    @property
    def num_steps(self) -> int:
        return self.action_spec.num_steps if self._steps is None else self._steps

    @torch.no_grad()
    def sample_actions(
        self, batch: PackedBatch, noise: Tensor | None = None, steps: int | None = None
    ) -> Tensor:
        """Normalized actions (S, C, A) of a model in one process. `kit.actions.sample_actions` serves every layout."""
        output: Tensor = self(with_noise(batch, noise), ["actions"], steps=steps)["actions"]
        return output

    def check(self, batch: PackedBatch) -> None:
        """Raise for fields of wrong shapes. Runs on host tensors."""
        super().check(batch)
        spec = self.action_spec
        count = batch.num_sequences
        shapes: dict[str, tuple[int | None, ...]] = {
            STATE: (count, spec.state_dim),
            CHUNK: (count, spec.chunk, spec.action_dim),
            MASK: (count, spec.chunk, spec.action_dim),
            NOISE: (count, None, spec.chunk, spec.action_dim),
            TIMES: (count, None),
        }
        for name, wanted in shapes.items():
            value = batch.sequence_fields.get(name)
            if value is None:
                continue
            found = tuple(value.shape)
            fits = len(found) == len(wanted)
            fits = fits and all(w in (None, f) for w, f in zip(wanted, found, strict=True))
            if not fits:
                shown = tuple("N" if size is None else size for size in wanted)
                raise UserError(
                    f"sequence_fields[{name!r}] has the shape {found}; this model needs {shown} (chunk_size="
                    f"{spec.chunk}, max_action_dim={spec.action_dim}, max_state_dim={spec.state_dim}): pad the rows, "
                    "or set these keys in model.config"
                )


def with_noise(batch: PackedBatch, noise: Tensor | None) -> PackedBatch:
    """A batch whose start of the Euler integration is `noise` (S, C, A); None: that of the batch."""
    if noise is None:
        return batch
    fields = {**batch.sequence_fields, NOISE: noise[:, None]}
    new = object.__new__(type(batch))
    new.__dict__.update(batch.__dict__)
    new.sequence_fields = fields
    return new


def field(batch: PackedBatch, name: str, needed_for: str) -> Tensor:
    """A per-sequence field, or an error that names it."""
    if name not in batch.sequence_fields:
        raise UserError(
            f"the batch has no sequence_fields[{name!r}], which {needed_for} needs: docs/actions.md lists the fields"
        )
    return batch.sequence_fields[name]


class Appended(NamedTuple):
    """Tokens behind all prefixes, whose embeddings the model replaces."""

    token: int
    position_ids: Tensor  # (U,) or (A, U)


def run_base(
    model: PackedModel,
    batch: PackedBatch,
    need_types: bool = True,
    appended: Appended | None = None,
    **options: Any,
) -> Any:
    """The output of `model.base()` on a packed batch; `options` reach every text layer."""
    base = model.base()
    input_ids = batch.input_ids
    host_ids = batch.host_input_ids
    position_ids = batch.position_ids
    if appended is not None:
        length = appended.position_ids.shape[-1]
        input_ids = torch.cat([input_ids, input_ids.new_full((length,), appended.token)])
        position_ids = torch.cat([position_ids, appended.position_ids], dim=-1)
        if host_ids is not None:
            host_ids = torch.cat([host_ids, host_ids.new_full((length,), appended.token)])
    input_ids_1T = input_ids[None]
    if batch.media:
        media_features.register_host_ids(input_ids_1T, host_ids)
    # The longest prompt differs from pack to pack; as a bound for kernels it need not be exact.
    longest = -(-batch.max_seqlen // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return base(
        input_ids=input_ids_1T,
        position_ids=position_ids.unsqueeze(-2),
        use_cache=False,
        **attention.boundaries(batch.cu_seqlens, longest),
        **media_inputs(base, batch, need_types=need_types),
        **options,
    )


class ActionAdapter(HFAdapter):
    """Action models as model engines see them."""

    model: ActionModel

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        raise UserError(
            "parallel.tensor > 1 does not support model.type=action_model: set parallel.tensor=1 and parallel.shard"
        )

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        raise UserError(
            "parallel.pipeline > 1 does not support model.type=action_model: set parallel.pipeline=1 and parallel.shard"
        )


class ActionModelEngine(PackedModelEngine):
    """An action model: chunks of actions from images, a prompt and a state."""

    model_class = ActionModel


def sample_actions(
    engine: ModelEngine,
    batch: PackedBatch,
    noise: Tensor | None = None,
    steps: int | None = None,
    budget: int | None = None,
) -> Tensor:
    """Normalized actions (S, C, A) on the CPU. Where ranks share a forward, all of them call it.

    `noise` (S, C, A): where a flow head starts; None: the first draw of the batch. `steps`: Euler steps, by default
    those of the model's config. `budget`: tokens of a micro-batch; None: all sequences in one.
    """
    batch = with_noise(batch, noise)
    split = batch.split(batch.num_tokens if budget is None else budget)
    model: Any = engine.model

    def act(part: PackedBatch) -> Tensor:
        actions: Tensor = model(part, ["actions"], steps=steps)["actions"]
        return actions.cpu()

    with engine.eval_mode():
        parts = list(engine.infer_micro_batches(split.parts, act))
    order = torch.tensor([sequence for members in split.members for sequence in members])
    return torch.cat(parts)[order.argsort()]
