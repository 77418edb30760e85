"""ActionDataKit: the data kit for action models. Sources of `data.sources` that are LeRobot folders give frames.

    kit = ActionDataKit(config.data, config.actions, tokenizer, model_config=config)
    kit.normalization                            # from parquet files alone
    loader = kit.engine_loader(engine, "train")  # in prepare_dataloader

Other sources are chats with images as ever, so a mixture co-trains both kinds from the same packs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit import flow
from mvp_engine.kit.actions import act
from mvp_engine.kit.actions.act import FORMAT, Normalization
from mvp_engine.kit.actions.encode import ActionRowEncoder, Pi0RowEncoder
from mvp_engine.kit.actions.rows import FrameRows, is_lerobot, robot_facts
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.actions.simulation import Observation
from mvp_engine.kit.actions.stats import Stats, merged_stats, relative_parts
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.costs import MEDIA_BITS, Costs
from mvp_engine.kit.data.pack.packs import PackDataset
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_types import RowFormat
from mvp_engine.kit.data.read.sources import Source, split_rows
from mvp_engine.kit.data.settings import DataSource, MLLMData


class ActionPackDataset(PackDataset):
    """Packs of frames with this epoch's noise and times, drawn in the worker from seed, epoch and sample id."""

    draws: int = 1
    times: flow.FlowTimes | None = None  # None: the head is no flow and reads no noise

    def __getitem__(self, index: int) -> tuple[PackedBatch, list[BadRecord]]:
        batch, bad = super().__getitem__(index)
        if self.times is None:
            return batch, bad
        shape = tuple(batch.sequence_fields["action_chunk"].shape[1:])
        drawn = []
        for sample in batch.sequence_fields["sample"].tolist():
            drawn.append(flow.draw(self.seed, self.epoch, sample, shape, self.draws, self.times))
        batch.sequence_fields["action_noise"] = torch.stack([one.noise for one in drawn])
        batch.sequence_fields["action_times"] = torch.stack([one.times for one in drawn])
        return batch, bad


class ActionDataKit(MLLMDataKit):
    """The data of an action model. `processor` is its tokenizer, or a processor for rows of images and text."""

    row_encoder: ActionRowEncoder
    dataset_class = ActionPackDataset

    def __init__(
        self,
        settings: MLLMData,
        actions: ActionData,
        processor: Any,
        *,
        model_config: Any,
        num_workers: int = 0,
    ) -> None:
        self.actions = actions
        is_pi0 = getattr(model_config, "model_type", None) == "pi0"
        self.encoder_class = Pi0RowEncoder if is_pi0 else ActionRowEncoder
        if is_pi0:  # its prefixes need no processor
            processor = getattr(processor, "tokenizer", processor)
        super().__init__(
            settings,
            processor,
            model_config=None if is_pi0 else model_config,
            num_workers=num_workers,
        )
        if not any(is_lerobot(one.path) for one in self.sources("train")):
            paths = ", ".join(str(one.path) for one in self.sources("train"))
            raise UserError(
                f"data.sources: none of split train is a LeRobot folder with meta/info.json ({paths}), and an action "
                "model learns from one"
            )
        encoder = self.row_encoder
        encoder.set_model(model_config)
        self.spec = encoder.spec
        self.times = None
        if isinstance(encoder, Pi0RowEncoder):
            self.times = actions.times or flow.times_of_config(model_config)
            encoder.cotrains = not all(is_lerobot(one.path) for one in self._all_sources)
            self._check_text(encoder.cotrains)
        self._folders: dict[str, FrameRows] = {}

    def _check_text(self, cotrains: bool) -> None:
        if cotrains and self.settings.overlong in ("truncate", "shrink"):
            raise UserError(
                f"data.overlong={self.settings.overlong}: rows of images and text for pi0 are not made shorter. Set "
                "data.overlong=drop"
            )
        if self.actions.text_weight and not cotrains:
            raise UserError(
                f"actions.text_weight={self.actions.text_weight}: all of data.sources are LeRobot folders without text "
                "to learn. Set it to 0, or add a source of questions and answers"
            )

    # ---- Sources ------------------------------------------------------------------------------------

    def open_rows(self, settings: DataSource) -> Source:
        if not is_lerobot(settings.path):
            return super().open_rows(settings)
        rows = self.folder(settings)
        source = Source([rows], rows.folder.root)
        if not settings.hold_out:
            return source
        # Whole episodes are held out: frames of one episode resemble each other.
        count = len(rows.folder.episodes)
        if count == 1:
            raise UserError(
                f"data: {settings.label} has one episode, and hold_out needs two: set its hold_out to null"
            )
        held_out, trained = split_rows(count, settings.hold_out)
        chosen = held_out if settings.split == "eval" else trained
        return source.subset(np.flatnonzero(np.isin(rows.frames.episode, chosen)))

    def folder(self, settings: DataSource) -> FrameRows:
        """The frames of a source, read once."""
        path = str(settings.path)
        if path not in self._folders:
            first = next(one for one in self.sources("train") if is_lerobot(one.path))
            order = None if path == str(first.path) else self.folder(first).cameras
            rows = FrameRows(path, settings.label, self.actions, self.spec.chunk, order)
            self._check_sizes(rows)
            self._folders[path] = rows
        return self._folders[path]

    def _check_sizes(self, rows: FrameRows) -> None:
        limits = {
            "state": (self.actions.state, rows.state_size, self.spec.state_dim),
            "action": (self.actions.action, rows.action_size, self.spec.action_dim),
        }
        for kind, (key, size, limit) in limits.items():
            if size > limit:
                raise UserError(
                    f"{rows.folder.root}: {key} has {size} values, and max_{kind}_dim of the model is {limit}. Set "
                    f"model.config.max_{kind}_dim={size} for a model from scratch, or choose another feature with "
                    f"actions.{kind}"
                )
        for other in self._folders.values():
            if (other.state_size, other.action_size) != (rows.state_size, rows.action_size):
                raise UserError(
                    f"{rows.folder.root} has states and actions of {rows.state_size} and {rows.action_size} values, "
                    f"{other.folder.root} of {other.state_size} and {other.action_size}: one training has one "
                    "normalization. Train them in runs of their own"
                )

    def measure_source(self, name: str, source: Source, row_format: RowFormat) -> Costs:
        rows = source.files[0]
        if not isinstance(rows, FrameRows):
            return super().measure_source(name, source, row_format)
        # Known without a look at any frame: tokens of the instruction, and of each camera.
        chosen = source.chosen_rows()
        costs = Costs.zeros(len(source))
        by_task: dict[tuple[int, int], tuple[int, int]] = {}
        for place, row in enumerate(chosen.tolist()):
            if row in rows.frames.bad:
                costs.bad[place] = rows.frames.bad[row]
                continue
            key = (int(rows.frames.task[row]), int(rows.frames.episode[row]))
            if key not in by_task:
                by_task[key] = self.row_encoder.prefix_cost(rows.task(row), rows.image_sizes)
            costs.tokens[place] = by_task[key][0]
            costs.encoder[place] = by_task[key][1]
        costs.media[costs.tokens > 0] = MEDIA_BITS["image"] if rows.cameras else 0
        costs.long = np.flatnonzero(costs.tokens > self.row_encoder.max_tokens)
        for array in (costs.tokens, costs.encoder, costs.media):
            array[costs.long] = 0
        return costs

    def dataset(self, split: str = "train", **options: Any) -> PackDataset:
        self.row_encoder.normalization = self.normalization
        dataset = super().dataset(split, **options)
        assert isinstance(dataset, ActionPackDataset)
        dataset.draws = self.actions.draws
        dataset.times = self.times
        return dataset

    # ---- Normalization ------------------------------------------------------------------------------

    def train_folders(self) -> list[tuple[FrameRows, np.ndarray]]:
        """The LeRobot folders of split train, and which of their frames are trained on and are not bad."""
        found = []
        for settings in self.sources("train"):
            if is_lerobot(settings.path):
                rows = self.folder(settings)
                used = np.zeros(len(rows.frames), bool)
                used[self.open_rows(settings).chosen_rows()] = True
                found.append((rows, used & rows.frames.good))
        return found

    @cached_property
    def relative(self) -> list[int]:
        """The dimensions of the action that are relative to the state."""
        rows = self.train_folders()[0][0]
        known = min(rows.state_size, rows.action_size)
        chosen = self.actions.relative
        if chosen is True:
            if rows.state_size < rows.action_size:
                raise UserError(
                    f"actions.relative=true: the action has {rows.action_size} values, the state {rows.state_size}. "
                    f"List the dimensions that correspond, such as actions.relative={list(range(known))}"
                )
            return list(range(rows.action_size))
        dims = sorted(set(chosen or []))
        if dims and not 0 <= dims[0] <= dims[-1] < known:
            raise UserError(
                f"actions.relative={dims}: dimensions are 0 to {known - 1}, which state and action both have"
            )
        return dims

    @cached_property
    def normalization(self) -> Normalization:
        """Statistics and everything else that acting needs; `actions.statistics`, or from the training frames."""
        rows = self.train_folders()[0][0]
        if self.actions.statistics is None:
            stats = self.statistics()
            entries = {name: one.to_json() for name, one in stats.items()}
        else:
            entries = self._given_statistics(Path(self.actions.statistics).expanduser())
        for name, size in (("state", rows.state_size), ("action", rows.action_size)):
            found = len(entries[name]["mean"])
            if found != size:
                raise UserError(
                    f"actions.statistics={self.actions.statistics}: {name} has {found} values, the data {size}"
                )
        # Of prompts by a chat template, and only where there are options: checkpoints without the entry resume.
        has_options = bool(self.settings.template) and not isinstance(
            self.row_encoder, Pi0RowEncoder
        )
        template = {"template": self.settings.template} if has_options else {}
        return Normalization(
            {
                **template,
                "format": FORMAT,
                "mode": self.actions.normalize,
                "relative": self.relative,
                "state": entries["state"],
                "action": entries["action"],
                "cameras": rows.cameras,
                "image": self.row_encoder.image_spec(),
                "names": {
                    "state": rows.folder.names_of(self.actions.state),
                    "action": rows.folder.names_of(self.actions.action),
                },
                "chunk": self.spec.chunk,
                "fps": rows.folder.fps,
            }
        )

    def load_normalization(self, spec: dict[str, Any], is_resumed: bool) -> None:
        """Use the normalization of a checkpoint: its weights need the statistics that they were trained with.

        A training that is resumed must still have the same ones.
        """
        saved = Normalization(spec)
        current = self.normalization.spec if is_resumed else saved.spec
        if saved.spec != current:
            changed = [name for name, value in saved.spec.items() if value != current.get(name)]
            raise UserError(
                f"the checkpoint was trained with another normalization ({', '.join(changed)}): restore the data and "
                "the section actions, set actions.statistics to the checkpoint's normalization.json, or start a new "
                "run from its weights (model.path)"
            )
        self.normalization = saved

    def observation_batch(self, observations: Sequence[Observation]) -> PackedBatch:
        """One packed batch with the input of the model for each observation: task, images and state."""
        encoder = self.row_encoder
        encoder.normalization = normalization = self.normalization
        batches = []
        for observation in observations:
            try:
                images = normalization.frames(observation.images)
            except ValueError as error:
                raise UserError(str(error)) from None
            if len(observation.state) != normalization.state_size:
                raise UserError(
                    f"an observation has a state of {len(observation.state)} values; the model was trained with "
                    f"{normalization.state_size} ({self.actions.state})"
                )
            batches.append(encoder.observation(observation.task, images, observation.state, {}))
        return PackedBatch.concat(batches)

    def start_noise(self, seed: int, keys: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """The noise (observations, steps, size) that chunks start from; None: the head is no flow.

        `keys`: (episode, number of the chunk in it) of each observation. Noise depends on them and on `seed` alone, so
        it does not depend on how episodes are batched.
        """
        if self.times is None:
            return None
        shape = (self.spec.chunk, self.spec.action_dim)
        draws = [flow.draw(seed, decision, episode, shape) for episode, decision in keys]
        return torch.cat([draw.noise for draw in draws])

    def statistics(self) -> dict[str, Stats]:
        """The statistics of the training frames: `state`, and `action` as it is trained, relative or absolute."""
        states = []
        actions = []
        for rows, used in self.train_folders():
            states.append(rows.states[used])
            if not self.relative:
                actions.append(rows.actions[used])
                continue
            # Chunks end with their episode, and at a frame that is not used, as those of rows do.
            index = np.flatnonzero(used)
            follows = (np.diff(index) == 1) & (np.diff(rows.frames.episode[index]) == 0)
            ends = np.flatnonzero(np.append(~follows, True))
            last = ends[np.searchsorted(ends, np.arange(len(index)))]
            actions += relative_parts(
                rows.actions[used], rows.states[used], last, self.relative, self.spec.chunk
            )
        if not sum(map(len, states)):
            bad = self.bad_rows("train")
            first = f": {bad[0].where}: {bad[0].detail}" if bad else ""
            raise UserError(f"no frame of the training folders can be used{first}")
        return {"state": merged_stats(states), "action": merged_stats(actions)}

    def _given_statistics(self, path: Path) -> dict[str, Any]:
        key = f"actions.statistics={path}"
        file = path / act.FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{key}: no such file")
        try:
            spec = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{key} is not JSON: {error}") from None
        is_ours = "format" in spec
        relative = spec.get("relative", []) if is_ours else []
        if relative != self.relative:
            theirs = f"of actions relative in {relative}" if relative else "of absolute actions"
            wanted = f"relative in dimensions {self.relative}" if self.relative else "absolute"
            raise UserError(
                f"{key} has the statistics {theirs}, but actions.relative trains them {wanted}: they would be scaled "
                "by the wrong numbers. Set actions.statistics=null to compute them from the data, or change "
                "actions.relative"
            )
        names = ("state", "action") if is_ours else (self.actions.state, self.actions.action)
        missing = [name for name in names if name not in spec]
        if missing:
            raise UserError(f"{key} has no entry {missing[0]!r}; it has {', '.join(spec)}")
        for name in names:
            lacks = [
                one for one in ("mean", *act.MODES[self.actions.normalize]) if one not in spec[name]
            ]
            if lacks:
                raise UserError(
                    f"{key} has no {lacks[0]} of {name}, which actions.normalize={self.actions.normalize} needs: set "
                    "actions.statistics=null to compute it from the data, or another actions.normalize"
                )
        return {"state": spec[names[0]], "action": spec[names[1]]}

    def facts(self, split: str) -> dict[str, Any]:
        """Those of the first LeRobot folder of a split."""
        folders = [settings for settings in self.sources(split) if is_lerobot(settings.path)]
        return {"robot": robot_facts(self.folder(folders[0])) if folders else {}}

    def save_processor(self, folder: Path, model: str | None = None) -> None:
        """The processor, normalization.json and act.py, which go into checkpoints and exports."""
        super().save_processor(folder, model)
        self.normalization.save(folder)
        (folder / "act.py").write_text(Path(act.__file__).read_text())
