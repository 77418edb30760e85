"""The packs of a plan, loaded: their rows read, tokenized and decoded in workers, and given to ranks by stride."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from mvp_engine.data import SampleLoader, derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import Sampler
from mvp_engine.kit.data.pack.costs import Costs
from mvp_engine.kit.data.pack.mixture import Mixture
from mvp_engine.kit.data.pack.plan import Plan, make_plan
from mvp_engine.kit.data.pack.worker_watchdog import Watch
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.rows import BadRow
from mvp_engine.kit.data.read.sources import Source

CURE = "Were its media replaced? Costs are kept (mllm.cache; by default ~/.cache/mvp_engine/data): remove them"


class PackDataset(Dataset[Any]):
    """The packs of an epoch: item i is (PackedBatch, the rows that turned out bad and were left out)."""

    def __init__(
        self,
        mixture: Mixture,
        formats: list[str | None],
        costs: list[Costs],
        sampler: Sampler,
        *,
        budget: int,
        packs_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.mixture, self.formats, self.costs, self.sampler = mixture, formats, costs, sampler
        self.budget, self.packs_per_step, self.seed, self.shuffle = (
            budget,
            packs_per_step,
            seed,
            shuffle,
        )
        self.watch = Watch()
        self.first = np.cumsum(
            [0, *(len(source) for source in mixture.sources)]
        )  # sample ids count through all
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.plan = epoch, self.make_plan(epoch)

    def make_plan(self, epoch: int) -> Plan:
        order = self.mixture.order(self.seed, epoch, self.shuffle)
        flat = self.first[order[:, 0]] + order[:, 1]
        tokens = np.concatenate([costs.tokens for costs in self.costs])[flat]
        encoder = np.concatenate([costs.encoder for costs in self.costs])[flat]
        good = tokens > 0
        shuffle = (
            np.random.default_rng(derived_seed(self.seed, "packs", epoch)) if self.shuffle else None
        )
        sizes = {"budget": self.budget, "packs_per_step": self.packs_per_step}
        return make_plan(order[good], tokens[good], encoder[good], **sizes, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[PackedBatch, list[BadRecord]]:
        pairs, planned = self.plan.pack(index)
        room = self.budget - int(planned.sum())
        batches, bad = [], []
        for (which, row), tokens in zip(pairs.tolist(), planned.tolist(), strict=True):
            source: Source = self.mixture.sources[which]
            fields = {"source": which, "sample": int(self.first[which]) + row}
            self.watch.at(source.where(row))
            try:
                sides = self.sampler.prepare(
                    source[row], self.formats[which], source.root, decode=True
                )
                now = sum(len(side.ids) for side in sides)
                room -= max(0, more := now - tokens)
                if (
                    room < 0
                ):  # a template may write today's date; but a pack never grows past its budget
                    room += more
                    raise BadRow(
                        "changed", f"{now} tokens, but {tokens} when it was planned. {CURE}"
                    )
                batches += self.sampler.load(sides, source.root, fields)
            except BadRow as error:
                bad.append(
                    BadRecord(
                        self.mixture.names[which], source.where(row), error.reason, error.detail
                    )
                )
            except Exception as error:
                error.add_note(f"while reading {source.where(row)}")
                raise
        batches = batches or [self.sampler.nothing({"source": 0, "sample": -1})]
        return (PackedBatch.concat(batches) if len(batches) > 1 else batches[0]), bad


class PackLoader(SampleLoader):
    """This rank's packs of the current epoch as PackedBatches, with the cursor of a `SampleLoader`: packs done."""

    dataset: PackDataset

    def __init__(
        self,
        dataset: PackDataset,
        bad_rows: BadRows,
        data_id: str,
        stall_seconds: float = 300.0,
        **options: Any,
    ) -> None:
        self.bad_rows, self.data_id, self.stall_seconds = bad_rows, data_id, stall_seconds
        options |= {
            "global_batch_size": dataset.packs_per_step,
            "seed": dataset.seed,
            "collate_fn": _only,
        }
        super().__init__(
            dataset, micro_batch_size=1, shuffle=False, timeout=stall_seconds, **options
        )

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch, bad in super().__iter__():
            self.bad_rows.add(bad)
            yield batch

    def _items(self) -> Iterator[Any]:
        return self.dataset.watch.items(super()._items, self.stall_seconds)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plan": self._plan_id()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["plan"] != self._plan_id():
            raise UserError(
                "the data, the processor or the packing is not what the checkpoint was trained with, so its place in "
                "the epoch means nothing here: put them back, or start a new run from its weights (model.path)"
            )

    def sample_ids(self, first: int, last: int) -> list[Any]:
        """Where the rows of this rank's micro-batches `first` to `last` (exclusive) come from."""
        sources = self.dataset.mixture.sources
        packs = [self.dataset.plan.pack(index)[0] for index in super().sample_ids(first, last)]
        return [sources[which].where(row) for pack in packs for which, row in pack.tolist()]

    def _plan_id(self) -> str:
        return f"{self.data_id}-{self.dataset.plan.digest}"


def _only(items: list[Any]) -> Any:
    return items[0]
