"""Does a recipe sum, hold out, resume and export as it must? `check.py CONFIG [key=value ...]`; see SKILL.md."""

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
from mvp_engine.engine.resume import choose_start
from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMModelKit, load_processor
from mvp_engine.launch import launch
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.runs import Run

STEPS = 4
QUIET = ["log.backends=[file,jsonl]", "device=cpu", "log.interval=1", "loop.precision=fp32", "model.compile=null"]
QUIET += ["resume=null", "workflow=train"]


def problems(config: str, words: list[str]) -> list[str]:
    """What is wrong with a recipe, in words."""
    with tempfile.TemporaryDirectory() as name:
        words = [*words, *QUIET, f"project.dir={name}"]
        return [*_sums(config, words), *_holds_out(config, words)] or _runs(config, words, Path(name))


def _engine(config: str, words: list[str]) -> Any:
    composed = compose(config, words)
    start = choose_start(composed.config)
    return composed.engine_class(composed.config, World.join("cpu"), start.run, start.checkpoint, start.message)


def _sums(config: str, words: list[str]) -> list[str]:
    """Whether the loss of a batch is that of its sequences, summed."""
    with _engine(config, words) as engine:
        engine.before_evaluate()
        batch = next((b for b in engine.prepare_dataloader("train") if b.num_sequences > 1), None)
        if batch is None:
            return ["no micro-batch has two sequences: raise mllm.micro_batch_tokens for this check"]
        ctx = StepContext(0, 0, "train", engine.metrics)

        def step(part: PackedBatch) -> tuple[float, float]:
            forward = partial(engine.forward_step, ctx)
            [(loss_sum, weight)] = engine.model_engine.infer_micro_batches([part], forward)
            return float(loss_sum), float(weight)

        with engine.model_engine.eval_mode():
            whole = step(batch)
            parts = [step(batch.select([s])) for s in range(batch.num_sequences)]
    total = [sum(values) for values in zip(*parts, strict=True)]
    if any(abs(a - b) > 1e-4 * max(1.0, abs(b)) for a, b in zip(whole, total, strict=True)):
        told = f"of {len(parts)} sequences the loss is {whole[0]:.4f} and the weight {whole[1]:g}, one by one they are "
        return [f"forward_step gives no sums: {told}{total[0]:.4f} and {total[1]:g} together"]
    return []


def _holds_out(config: str, words: list[str]) -> list[str]:
    """Whether held-out rows are trained on: the same tokens, with the same media."""
    composed = compose(config, words)
    kit = composed.engine_class.data_kit(composed.config)  # type: ignore[attr-defined]
    try:
        batches = {split: list(kit.loader(split, global_batch_size=1, num_workers=0)) for split in ("train", "eval")}
    except UserError as error:
        return [f"train and eval need rows: {error}"]
    known, wrong = {one for batch in batches["train"] for _, one in _seen(batch)}, list[str]()
    for source, name in enumerate(kit.source_names("eval")):
        rows = [one for batch in batches["eval"] for of, one in _seen(batch) if of == source]
        again = sum(one in known for one in rows)
        if again > 0.1 * len(rows):
            wrong.append(f"{again} of {len(rows)} held-out rows of {name} are trained on, to the last pixel")
    return wrong


def _seen(batch: PackedBatch) -> Iterator[tuple[int, str]]:
    """The source of each sequence, and a hash of all that a model sees of it."""
    for s, source in enumerate(batch.sequence_fields["source"].tolist()):
        one = batch.select([s])
        told = hashlib.blake2b(one.input_ids.numpy().tobytes(), digest_size=12)
        for _, media in sorted(one.media.items()):
            told.update(media.values.contiguous().numpy().tobytes())
        yield source, told.hexdigest()


def _runs(config: str, words: list[str], folder: Path) -> list[str]:
    """A short training, the same once more from its middle, and what it exports."""
    words = [*words, f"loop.total_steps={STEPS}", "loop.epochs=null"]
    words += [f"loop.eval_interval={STEPS}", f"checkpoint.interval={STEPS // 2}", "checkpoint.keep_n=null"]
    if code := launch(config, [*words, "project.run_id=first", f"export={folder / 'exported'}"]):
        return [f"a training of {STEPS} steps ends with exit code {code}: see above"]
    run = Run(folder / "first")
    middle = run.checkpoint_list()[0]
    if code := launch(config, [*words, "project.run_id=second", f"resume={middle}", f"export={folder / 'again'}"]):
        return [f"resuming from {middle.name} ends with exit code {code}: see above"]
    wrong, records = list[str](), [_records(one) for one in (run, Run(folder / "second"))]
    losses = [[r["loss"] for r in one if r["split"] == "train"] for one in records]
    if losses[0] != losses[1]:
        wrong.append(f"a resumed training is another one: losses {losses[0]}, resumed {losses[1]}")
    figures = next((r for r in records[0] if r["split"] == "eval"), {})
    if not [name for name in figures if name not in ("step", "epoch", "split") and not name.startswith("loss")]:
        wrong.append("the evaluation has losses and no figure of the task: set ask, and override score")
    return wrong + _exported(config, words, run, folder / "exported")


def _records(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def _exported(config: str, words: list[str], run: Run, folder: Path) -> list[str]:
    """Whether the folder loads, with its processor, and says what the checkpoint says."""
    import transformers

    with _engine(config, [*words, "workflow=evaluate", f"resume={run.dir}"]) as engine:
        engine.before_evaluate()
        batch = next(iter(engine.prepare_dataloader("eval")))
        expected = engine.model_engine.infer_batch(batch, ["log_probs"])["log_probs"]
        text = PackedBatch.from_sequences([torch.arange(7, 47)])
        of_text = engine.model_engine.infer_batch(text, ["log_probs"])["log_probs"][:-1]
        processor = engine.data.processor
    try:
        loaded = load_processor(folder)
        model = MLLMModelKit().build(ModelSource(str(folder)))
        reader = LanguageModelEngine(model, engine.layout)  # type: ignore[arg-type]
        reader.initialize()
        about = transformers.AutoConfig.from_pretrained(folder)
        theirs = getattr(transformers, about.architectures[0]).from_pretrained(folder).eval()
    except (UserError, OSError, ValueError) as error:
        return [f"the export does not load: {error}"]
    wrong = []
    if _template(loaded) != _template(processor):
        wrong.append("the export's processor has another chat template than the one trained with")
    apart = float((reader.infer_batch(batch, ["log_probs"])["log_probs"] - expected).abs().max())
    with torch.no_grad():
        logits = theirs(text.input_ids[None]).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(-1, text.input_ids[1:, None])[:, 0]
    apart = max(apart, float((picked - of_text).abs().max()))
    if apart > 1e-3:
        wrong.append(f"the export is another model than the trained one: log-probs differ by up to {apart:.1e}")
    return wrong


def _template(processor: Any) -> Any:
    return getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)


def main(words: list[str]) -> int:
    if not words:
        print("check.py CONFIG [key=value ...]")
        return 2
    wrong = problems(words[0], words[1:])
    print("\n".join(wrong) or "ok")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
