"""Generation on packed batches equals transformers' `generate`, for any number of prompts per rank."""

import inspect
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import VISION, parallel
from run_files import json_lines
from tiny_engines import ALONE
from tiny_models import build_model, samples
from torch._dynamo import eval_frame

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts import fp8_layers, grouped_mm
from mvp_engine.kit import decoding
from mvp_engine.kit.decoding import Decoding, complete, stop_at
from mvp_engine.kit.generation import (
    Answer,
    generate,
    generate_answers,
    split_prompts,
    with_verdicts,
    write_answers,
)
from mvp_engine.model_engine import LanguageModelEngine, Settings
from mvp_engine.ops import fp8

FAMILIES = ["qwen3_vl", "gemma3", "qwen2_audio", "paligemma"]  # more in test_chat_families.py
FAMILIES += ["gemma2", "gpt_oss", "qwen3_moe"]  # soft caps, windows, sinks, experts
NEW = 5


def built(name, layout=None, settings=None):
    model = build_model(LanguageModel, name)
    ones = [PackedBatch.from_sequences([torch.arange(3, n)]) for n in (9, 6)]
    if name in VISION:
        ones = samples(model, name)
    engine = LanguageModelEngine(model, layout or ALONE, settings)
    engine.initialize()
    return engine, ones


def expected(folder, name, ones, stop):
    """The completions of transformers on the exported folder, prompt by prompt, with a KV cache."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    auto = AutoModelForMultimodalLM if name in VISION else AutoModelForCausalLM
    model = auto.from_pretrained(folder).eval()
    takes, found = inspect.signature(model.forward).parameters, []
    for one in ones:
        given = {n: value[None] for n, value in one.token_fields.items() if n in takes}
        for kind, media in one.media.items():
            given |= {kind: media.values, **media.fields} if len(media.row_counts) else {}
        ids = one.input_ids[None]
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        options = {"max_new_tokens": NEW, "eos_token_id": stop, "pad_token_id": 0}
        found.append(model.generate(**given, **options)[0, one.num_tokens :].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_generate_equals_transformers_generate_on_the_exported_folder(name, tmp_path):
    engine, ones = built(name)
    engine.export_hf(tmp_path / "export")
    free = expected(tmp_path / "export", name, ones, stop=-1)
    stop = free[-1][2]  # at least one completion ends early
    theirs = expected(tmp_path / "export", name, ones, stop)
    assert any(len(written) < NEW for written in theirs)
    prompts = PackedBatch.concat(ones)
    for budget in (None, 1, ones[-1].num_tokens + 9):
        assert generate(engine, prompts, max_new_tokens=NEW, stop={stop}, budget=budget) == theirs


def on_ranks(name, sizes, stop):
    """With data parallel ranks, rank r has r of the prompts, so rank 0 has none."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine, ones = built(name, layout)
    mine = ones[: layout.data_rank] if layout.data_size > 1 else ones
    prompts = PackedBatch.concat(mine) if mine else None
    found = generate(engine, prompts, max_new_tokens=NEW, stop={stop}, budget=40)
    world.close()
    return found


@pytest.mark.parametrize(
    "sizes",  # shard, ulysses and tensor: also in test_sampling.py
    [
        {},
        {"context": 2},
        *(pytest.param({size: 2}, marks=CAMPAIGN) for size in ("shard", "ulysses", "tensor")),
    ],
    ids=str,
)
def test_generate_on_every_layout_is_equal_and_ranks_without_prompts_take_part(ranks2, sizes):
    name = "qwen3" if "tensor" in sizes else "qwen3_vl"  # only text has a plan in transformers
    engine, ones = built(name)
    free = generate(engine, PackedBatch.concat(ones), max_new_tokens=NEW, stop=())
    stop = free[0][1]
    alone = [written[: written.index(stop) + 1] if stop in written else written for written in free]
    found = ranks2.run(on_ranks, name, sizes, stop)
    assert found == (
        [alone, alone] if sizes.keys() & {"context", "ulysses", "tensor"} else [[], alone[:1]]
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_generate_never_writes_a_placeholder_even_if_it_is_most_likely(has_bias):
    engine, ones = built("qwen3_vl")
    head = engine.model.hf.lm_head
    config = engine.model.hf.config
    tokens = [config.image_token_id, config.video_token_id]
    if has_bias:
        head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
        head.bias.data[tokens] = 1e4
    else:
        head.weight.data[tokens[0]] = 100 * head.weight.data[5]
        head.weight.data[tokens[1]] = -head.weight.data[tokens[0]]
    written = generate(engine, PackedBatch.concat(ones), max_new_tokens=NEW, stop=())
    assert not {token for answer in written for token in answer} & {*tokens}


class Letters:
    eos_token_id = 2

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(id) for id in ids if not skip_special_tokens or id != 2)


def test_generate_answers_chat_row_completes_its_last_prompt():
    engine, _ = built("qwen3_vl")
    ids = torch.arange(10, 22)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[3:5] = mask[8:11] = True
    fields = {"source": torch.tensor([0, 1]), "sample": torch.tensor([4, 7])}
    batch = PackedBatch.from_sequences(
        [ids, ids[:4]], [mask, mask[:4] & False], sequence_fields=fields
    )
    (prompt,) = split_prompts(batch)
    assert prompt.batch.input_ids.tolist() == ids[:8].tolist()
    assert (prompt.expected, prompt.sequence) == ([18, 19, 20], 0)
    assert bool((prompt.batch.labels == IGNORE).all())
    assert not prompt.is_continuation
    (one,) = generate_answers(engine, [batch], Letters(), max_new_tokens=3)
    (written,) = generate(engine, prompt.batch, max_new_tokens=3, stop={2})
    assert (one.source, one.sample, one.expected, one.right) == (0, 4, "18 19 20", False)
    assert one.written == Letters().decode(written, True)


def test_split_prompts_plain_text_starts_with_prompt_tokens():
    text, short = torch.arange(10, 22), torch.arange(5)
    first, second = split_prompts(PackedBatch.from_sequences([text, short]), 8)
    assert (first.sequence, second.sequence) == (0, 1)
    assert (first.batch.num_tokens, second.batch.num_tokens) == (8, 4)
    assert first.batch.input_ids.tolist() == text[:8].tolist()
    assert (first.expected, second.expected) == (text[8:].tolist(), [4])
    assert first.is_continuation
    assert second.is_continuation


def test_complete_samples_are_those_of_any_batching():
    engine, ones = built("qwen3_vl")
    prompts = PackedBatch.concat(ones)
    decoding = Decoding(max_new_tokens=NEW, temperature=0.7, samples=3, seed=1)
    together = complete(engine, prompts, decoding)
    assert [one.prompt for one in together] == sorted([*range(len(ones))] * 3)
    assert len({tuple(one.tokens) for one in together if one.prompt == 0}) > 1
    apart = complete(engine, prompts, replace(decoding, budget=1))
    assert [one.tokens for one in apart] == [one.tokens for one in together]


# Matrices of experts (out, in), and (in, out).
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_complete_in_fp8_quantizes_weights_once_with_equal_results(name, monkeypatch):
    engine, ones = built(name, settings=Settings(precision="bf16", fp8=True))
    places = fp8_layers.fp8_places(engine.model)
    weights = {module.get_parameter(name).data_ptr() for module, name in places}
    seen = []
    real = fp8.quantize
    for module in (fp8, grouped_mm, fp8_layers):
        watched = lambda rows: (seen.append(rows.data_ptr()), real(rows))[1]  # noqa: E731
        monkeypatch.setattr(module, "quantize", watched)
    found = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr(decoding, "quantized_once", lambda _: nullcontext())
        seen.clear()
        written = complete(engine, PackedBatch.concat(ones), Decoding(NEW, temperature=1.0))
        found.append([(one.tokens, one.log_probs) for one in written])
        assert len([rows for rows in seen if rows in weights]) == len(places) * (1 if once else NEW)
        assert all(
            getattr(module, fp8.quantized_name(name), None) is None for module, name in places
        )
    assert found[0] == found[1]


def test_complete_ends_where_the_caller_says():
    engine, ones = built("qwen3")
    (free,) = complete(engine, ones[0], Decoding(max_new_tokens=8))
    three = Decoding(max_new_tokens=8, is_finished=lambda tokens: len(tokens) == 3)
    (cut,) = complete(engine, ones[0], three)
    assert cut.tokens == free.tokens[:3]
    (stopped,) = complete(engine, ones[0], Decoding(max_new_tokens=8, stop={free.tokens[4]}))
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_complete_top_k_and_top_p_draw_from_the_most_likely_tokens():
    engine, ones = built("qwen3")
    with torch.no_grad():
        probs = engine.model(ones[0], ["next_logits"])["next_logits"][0].softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    decoding = Decoding(max_new_tokens=1, temperature=1.0, samples=400)
    in_p = int((probs.sort(descending=True).values.cumsum(-1) < 0.5).sum()) + 1
    cases = ({"top_k": 3}, 3), ({"top_p": 0.5}, in_p), ({"top_k": 1, "top_p": 0.5}, 1)
    for changes, count in cases:
        drawn = complete(engine, ones[0], replace(decoding, **changes))
        assert {one.tokens[0] for one in drawn} <= {*ranked[:count]}
        assert len({one.tokens[0] for one in drawn}) > count / 2
        for one in drawn[:5]:
            assert one.log_probs[0] == pytest.approx(float(probs[one.tokens[0]].log()), abs=1e-4)
    wrong = {"top_p": 0.0, "samples": 0, "temperature": -1.0, "top_k": 0, "max_new_tokens": 0}
    for name, value in wrong.items():
        with user_error(name):
            replace(decoding, **{name: value})


def test_complete_stop_string_ends_with_its_last_token():
    engine, ones = built("qwen3")
    decoding = Decoding(max_new_tokens=12, temperature=5.0)
    (free,) = complete(engine, ones[0], decoding)
    string = Letters().decode(free.tokens[2:5], True)
    stops = replace(decoding, is_finished=stop_at(Letters(), ["no", string]))
    (cut,) = complete(engine, ones[0], stops)
    assert cut.tokens == free.tokens[:5]
    assert (cut.is_finished, free.is_finished) == (True, False)


def test_write_answers_replaces_its_step_and_keeps_the_others(tmp_path):
    file = tmp_path / "answers.jsonl"
    for step, written in ((2, "no"), (4, "a\u2028b"), (2, "yes")):
        answers = with_verdicts([Answer(1, 7, "yes", written)], [written == "yes"])
        write_answers(file, step, ["chat", "text"], answers)
    found = json_lines(file)
    kept = [(one["step"], one["written"], one["right"]) for one in found]
    assert kept == [(4, "a\u2028b", False), (2, "yes", True)]
    assert found[0]["source"] == "text"
    unjudged = Answer(0, 7, "yes", "of course")  # by no `score`
    write_answers(file, 2, ["chat"], [unjudged])
    assert [json.loads(line)["right"] for line in file.open()] == [False, None]
    with user_error(r"score: it returned 2 verdicts for 1 answer: return one for each"):
        with_verdicts([Answer(0, 7, "yes", "no")], [True, False])


def test_decoding_of_two_threads_leaves_compiled_blocks_compiled():
    """torch's stance is one of the process; the thread that began first ends first."""
    first, second = (decoding._uncompiled() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance.stance == "default"
