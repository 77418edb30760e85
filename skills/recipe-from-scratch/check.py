"""Check a recipe: summed losses, held-out rows, exact resume, and an export that equals the trained model.

check.py CONFIG [key=value ...]    # see SKILL.md

A recipe without a data kit has no rows to compare, and one without the key `export_link` no export: these checks are
left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mvp_engine.config import compose
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine import StepContext
from mvp_engine.engine.state import choose_start
from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMModelKit, load_processor
from mvp_engine.kit.row_checks import split_micro_batch
from mvp_engine.launch import launch
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.runs import Run
from mvp_engine.tools.skill_check import run_check

STEPS = 4
OVERRIDES = [
    "log.backends=[file,jsonl]",
    "device=cpu",
    "log.interval=1",
    "train.precision=fp32",
    "model.compile=null",
    "resume=null",
    "workflow=train",
]
MAX_OVERLAP = 0.1  # fraction of held-out rows that may be training rows too
MAX_LOG_PROB_ERROR = 1e-3


def problems(config: str, overrides: list[str]) -> list[str]:
    """The problems of a recipe, one sentence each."""
    with tempfile.TemporaryDirectory() as name:
        overrides = [*overrides, *OVERRIDES, f"output_dir={name}"]
        found = _loss_problems(config, overrides)
        if hasattr(compose(config, overrides).engine_class, "data_kit"):
            found += _split_problems(config, overrides)
        return found or _run_problems(config, overrides, Path(name))


def _engine(config: str, overrides: list[str]) -> Any:
    composed = compose(config, overrides)
    start = choose_start(composed.config)
    return composed.engine_class(composed.config, World.join("cpu"), start.run, start.checkpoint, start.message)


def _loss_problems(config: str, overrides: list[str]) -> list[str]:
    """The loss of a micro-batch must be the sum of the losses of its parts."""
    with _engine(config, overrides) as engine:
        engine.before_evaluate()
        split = getattr(engine, "split_micro_batch", split_micro_batch)
        batch, parts = next(((b, parts) for b in engine.prepare_dataloader("train") if (parts := split(b))), (None, []))
        if batch is None:
            return [
                "no micro-batch has two rows: raise data.micro_batch_size (data.pack_tokens for packs) for this "
                "check, or define split_micro_batch (docs/check.md)"
            ]
        ctx = StepContext(0, 0, "train", engine.metrics)

        def forward(micro_batch: Any) -> tuple[float, float]:
            forward_step = partial(engine.forward_step, ctx)
            [(loss_sum, weight)] = engine.model_engine.infer_micro_batches([micro_batch], forward_step)
            return float(loss_sum), float(weight)

        with engine.model_engine.eval_mode():
            loss_sum, weight = forward(batch)
            numbers = [forward(part) for part in parts]
    expected_loss = sum(part[0] for part in numbers)
    expected_weight = sum(part[1] for part in numbers)
    if _is_close(loss_sum, expected_loss) and _is_close(weight, expected_weight):
        return []
    return [
        f"forward_step does not return sums: for a micro-batch it returns ({loss_sum:.4f}, {weight:g}), the sum over "
        f"its rows in {len(parts)} parts is ({expected_loss:.4f}, {expected_weight:g})"
    ]


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * max(1.0, abs(b))


def _split_problems(config: str, overrides: list[str]) -> list[str]:
    """Held-out rows must not be training rows: no row with the same tokens and the same media."""
    composed = compose(config, overrides)
    kit = composed.engine_class.data_kit(composed.config)  # type: ignore[attr-defined]
    try:
        train = list(kit.loader("train", global_batch_size=1, num_workers=0))
        held_out = list(kit.loader("eval", global_batch_size=1, num_workers=0))
    except UserError as error:
        return [f"train and eval need rows: {error}"]
    trained = {digest for batch in train for _, digest in _digests(batch)}
    by_source: dict[int, list[str]] = {}
    for batch in held_out:
        for source, digest in _digests(batch):
            by_source.setdefault(source, []).append(digest)
    found = list[str]()
    for source, name in enumerate(kit.source_names("eval")):
        rows = by_source.get(source, [])
        overlap = sum(digest in trained for digest in rows)
        if overlap > MAX_OVERLAP * len(rows):
            found.append(f"{overlap} of {len(rows)} held-out rows of {name} are training rows, equal in text and media")
    return found


def _digests(batch: PackedBatch) -> Iterator[tuple[int, str]]:
    """The source of each sequence, and a hash of its tokens and media."""
    for s, source in enumerate(batch.sequence_fields["source"].tolist()):
        sequence = batch.select([s])
        digest = hashlib.blake2b(sequence.input_ids.numpy().tobytes(), digest_size=12)
        for _, media in sorted(sequence.media.items()):
            digest.update(media.values.contiguous().numpy().tobytes())
        yield source, digest.hexdigest()


def _run_problems(config: str, overrides: list[str], folder: Path) -> list[str]:
    """A short training must resume from its middle with equal losses, compute a metric of the task, and export."""
    overrides = [
        *overrides,
        f"train.max_steps={STEPS}",
        "train.epochs=null",
        f"eval.steps={STEPS}",
        f"checkpoint.interval={STEPS // 2}",
        "checkpoint.keep_n=null",
    ]
    exports = "export_link" in compose(config, overrides).engine_class.config_class.model_fields
    words = [f"export_link={folder / 'exported'}"] if exports else []
    code = launch(config, [*overrides, "run_id=first", *words])
    if code:
        return [f"a training of {STEPS} steps ends with exit code {code}: see above"]
    run = Run(folder / "first")
    middle = run.checkpoint_list()[0]
    code = launch(config, [*overrides, "run_id=second", f"resume={middle}", *words])
    if code:
        return [f"resuming from {middle.name} ends with exit code {code}: see above"]
    found = list[str]()
    records = _records(run)
    losses = _train_losses(records)
    resumed_losses = _train_losses(_records(Run(folder / "second")))
    if losses != resumed_losses:
        found.append(f"a resumed training differs: losses {losses}, resumed {resumed_losses}")
    evaluation = next((record for record in records if record["split"] == "eval"), {})
    if all(name in ("step", "epoch", "split") or name.startswith("loss") for name in evaluation):
        found.append(
            "the evaluation computes losses and no metric of the task: set eval.generation, and override score; or "
            "override eval_step and call ctx.log"
        )
    if exports:
        found += _export_problems(config, overrides, run, folder / "exported")
    return found


def _records(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def _train_losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["split"] == "train"]


def _export_problems(config: str, overrides: list[str], run: Run, folder: Path) -> list[str]:
    """The export must load with its processor, here and in transformers, and compute the checkpoint's log-probs."""
    import transformers

    with _engine(config, [*overrides, "workflow=evaluate", f"resume={run.dir}"]) as engine:
        engine.before_evaluate()
        batch = next(iter(engine.prepare_dataloader("eval")))
        text = PackedBatch.from_sequences([torch.arange(7, 47)])
        expected = _log_probs(engine.model_engine, batch)
        expected_text = _log_probs(engine.model_engine, text)[:-1]
        processor = engine.data.processor
    try:
        exported_processor = load_processor(folder)
        model = MLLMModelKit().build(ModelSource(str(folder)))
        exported = LanguageModelEngine(model, engine.layout)  # type: ignore[arg-type]
        exported.initialize()
        hf_config = transformers.AutoConfig.from_pretrained(folder)
        hf_model = getattr(transformers, hf_config.architectures[0]).from_pretrained(folder).eval()
    except (UserError, OSError, ValueError) as error:
        return [f"the export does not load: {error}"]
    found = []
    if _template(exported_processor) != _template(processor):
        found.append("the export's processor has another chat template than the training's")
    with torch.no_grad():
        log_probs = hf_model(text.input_ids[None]).logits[0].log_softmax(-1)
    hf_text = log_probs[:-1].gather(-1, text.input_ids[1:, None])[:, 0]
    error = max(_difference(_log_probs(exported, batch), expected), _difference(hf_text, expected_text))
    if error > MAX_LOG_PROB_ERROR:
        found.append(f"the export differs from the trained model: log-probs by up to {error:.1e}")
    return found


def _log_probs(engine: Any, batch: PackedBatch) -> torch.Tensor:
    return engine.infer_batch(batch, ["log_probs"])["log_probs"]


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _template(processor: Any) -> Any:
    return getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)


def main() -> list[str]:
    if len(sys.argv) < 2:
        raise UserError("a config is missing: check.py CONFIG [key=value ...]")
    return problems(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    run_check(main)
