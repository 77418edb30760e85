"""CSM by `model.type=omni_model`: one pass equals generation, packs equal each alone, exports keep the codec."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import parallel
from folders import alone
from omni_models import speech_step
from sync_watch import MovedBatch, device_reads
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MFUKit
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings
from mvp_engine.kit.plan.step import peak_memory
from mvp_engine.kit.speech import OmniModel
from mvp_engine.kit.speech import rows as speech_rows
from mvp_engine.kit.speech.generate import generate_codes
from mvp_engine.kit.speech.omni_model import OmniModelEngine
from mvp_engine.kit.speech.protocol import SpeechError, SpeechProtocol, SpokenTurn
from mvp_engine.kit.speech.rows import SPEECH, num_speech_labels
from mvp_engine.model_engine import Settings

BOOKS, VOCAB, FRAMES = 4, 35, 6


def settings(tied=True):
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    common = {
        "num_codebooks": BOOKS,
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "head_dim": 8,
        **sizes,
    }
    depth = {
        **common,
        "hidden_size": 16,
        "backbone_hidden_size": 32,
        "max_position_embeddings": BOOKS + 1,
    }
    codec = {
        "model_type": "mimi",
        "hidden_size": 16,
        "num_filters": 4,
        "num_residual_layers": 1,
        "upsampling_ratios": [2, 2],
        "codebook_size": 32,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": BOOKS,
        "upsample_groups": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
    }
    return {
        **common,
        "hidden_size": 32,
        "text_vocab_size": 60,
        "codebook_pad_token_id": 34,
        "codebook_eos_token_id": 0,
        "audio_token_id": 58,
        "audio_eos_token_id": 59,
        "pad_token_id": 58,
        "bos_token_id": 57,
        "tie_codebooks_embeddings": tied,
        "depth_decoder_config": depth,
        "codec_config": codec,
    }


def config(tied=True):
    from transformers import CsmConfig

    return CsmConfig(**settings(tied))


@cache
def whole(tied=True):
    from transformers import CsmForConditionalGeneration

    torch.manual_seed(2)
    model = CsmForConditionalGeneration(config(tied)).eval()
    for name, table in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):
            table.normal_()  # zeros otherwise: all codes would be equal
    return model


def csm(tied=True):
    model = OmniModel.from_config(config(tied))
    state = {
        name: value
        for name, value in whole(tied).state_dict().items()
        if not name.startswith("codec_model.")
    }
    model.hf.load_state_dict(state)
    return model.eval()


def batch_of(ids, codes, ends=True):
    return turns_of(ids, [] if codes is None else [SpokenTurn(0, codes, ends=ends)])


def turns_of(ids, turns):
    protocol = SpeechProtocol.for_config(config())
    assert protocol is not None
    media = {SPEECH: protocol.plan(ids, torch.arange(len(ids)), turns)}
    return PackedBatch.from_sequences([ids], [torch.zeros(len(ids))], media=media)


@pytest.mark.parametrize("tied", [True, False])
def test_one_pass_of_csm_has_the_logits_of_step_by_step_generation(tied, monkeypatch):
    theirs = whole(tied)
    ids = torch.tensor([57, 5, 6, 7, 8])
    logits: list[list[Tensor]] = [[], []]
    hooks = [
        theirs.lm_head.register_forward_hook(lambda m, a, out: logits[0].append(out[0, -1])),
        theirs.depth_decoder.codebooks_head.register_forward_hook(
            lambda m, a, out: logits[1].append(out[0, -1])
        ),
    ]
    codes = theirs.generate(
        ids[None], max_new_tokens=FRAMES, do_sample=False, depth_decoder_do_sample=False
    )[0]
    for hook in hooks:
        hook.remove()
    found: dict[str, Tensor] = {}
    first, rest = speech_rows.linear_log_probs, speech_rows.batched_log_probs

    def of_first(hidden, weight, labels, **options):
        found["first"] = hidden @ weight.T
        return first(hidden, weight, labels, **options)

    def of_rest(hidden, weight, labels):
        found["rest"] = torch.bmm(hidden, weight.transpose(1, 2))
        return rest(hidden, weight, labels)

    monkeypatch.setattr(speech_rows, "linear_log_probs", of_first)
    monkeypatch.setattr(speech_rows, "batched_log_probs", of_rest)
    assert codes.shape[1] == BOOKS
    with torch.no_grad():
        csm(tied)(batch_of(ids, codes, ends=False), ["speech_loss"])
    steps = len(logits[0])
    assert steps == len(codes) > 2
    torch.testing.assert_close(found["first"][:steps], torch.stack(logits[0]), rtol=0, atol=1e-5)
    by_frame = torch.stack(logits[1]).view(steps, BOOKS - 1, VOCAB)
    torch.testing.assert_close(found["rest"].transpose(0, 1), by_frame, rtol=0, atol=1e-5)


def generated(model, ids, **context):
    """(F, K): transformers' greedy codes."""
    options = {"max_new_tokens": FRAMES, "do_sample": False, "depth_decoder_do_sample": False}
    # CSM's padding token is its placeholder of audio, so transformers would mask the sounds out.
    return model.generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], **options, **context
    )[0]


@pytest.mark.parametrize("tied", [True, False])
def test_generate_codes_of_csm_are_those_of_transformers_with_earlier_turns(tied):
    theirs = whole(tied)
    alone = torch.tensor([57, 5, 6, 7, 8])
    wanted = [generated(theirs, alone)]
    # The second prompt has an earlier turn with a sound, which transformers' own codec encodes.
    sound = torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        codes = theirs.codec_model.encode(sound).audio_codes[0].T
    assert len(codes.unique()) > 3
    earlier, later = torch.tensor([57, 9, 10]), torch.tensor([57, 11, 12, 13])
    placeholders = torch.tensor([58] * len(codes) + [59])
    ids = torch.cat([earlier, placeholders, later])
    cutoffs = torch.tensor([[sound.shape[-1]]])
    wanted.append(generated(theirs, ids, input_values=sound, input_values_cutoffs=cutoffs))
    spoken = SpokenTurn(0, codes, learnt=False)
    prompts = [batch_of(alone, None), turns_of(torch.cat([earlier, later]), [spoken])]
    options: dict[str, Any] = {"max_frames": FRAMES, "do_sample": False, "repetition_penalty": 1.0}
    model = csm(tied)
    found = generate_codes(model, prompts, **options)
    for one, codes_FK in zip(found, wanted, strict=True):
        assert torch.equal(one.codes, codes_FK[: len(one.codes)])
        assert len(one.codes) == FRAMES or one.ended
    silent = generate_codes(model, [batch_of(torch.cat([earlier, later]), None)], **options)
    assert not torch.equal(silent[0].codes, found[1].codes)
    with user_error("no list of speakers: write 'ethan' into the text"):
        generate_codes(model, prompts[:1], ["ethan"])


def test_row_of_csm_with_two_turns_learns_the_second_from_the_first():
    """Two turns in one row equal transformers' pass over both; a turn without loss is read and not learnt."""
    g = torch.Generator().manual_seed(3)
    ids = torch.tensor([57, 5, 6, 57, 7, 8, 9])
    codes = [torch.randint(1, 32, (count, BOOKS), generator=g) for count in (3, 5)]
    both = turns_of(ids, [SpokenTurn(0, codes[0]), SpokenTurn(1, codes[1])])
    second = turns_of(ids, [SpokenTurn(0, codes[0], learnt=False), SpokenTurn(1, codes[1])])
    first = turns_of(ids, [SpokenTurn(0, codes[0])])
    protocol = SpeechProtocol.for_config(config())
    assert protocol is not None
    for batch, counts in ((both, [(0, 3), (1, 5)]), (first, [(0, 3)])):
        assert len(batch.media[SPEECH].values) == protocol.num_rows(ids, counts)
    model = csm()
    theirs = whole()
    with torch.no_grad():
        found = model(both, ["speech_log_probs"])["speech_log_probs"]
        losses = [model(one, ["speech_loss"])["speech_loss"] for one in (both, second, first)]
        end = torch.zeros(1, BOOKS, dtype=torch.long)
        frames = [
            theirs.backbone_model.embed_tokens(torch.cat([one, end])[None])[0] for one in codes
        ]
        text = theirs.embed_text_tokens(ids)
        embeds = torch.cat([text[:3], frames[0], text[3:], frames[1]])
        logits = theirs.lm_head(
            theirs.backbone_model(inputs_embeds=embeds[None]).last_hidden_state[0]
        )
    labels = torch.cat([codes[1][:, 0], end[:, 0]])
    wanted = logits.log_softmax(-1)[10:16].gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found[5:11, 0], wanted, rtol=0, atol=1e-5)
    assert len(found) == 3 + 1 + 1 + 5 + 1 + 1
    torch.testing.assert_close(losses[0], losses[1] + losses[2], rtol=1e-5, atol=1e-5)
    with pytest.raises(SpeechError, match="begin each turn with the token 57"):
        protocol.plan(ids, torch.arange(7), [SpokenTurn(2, codes[0])])


def rows():
    g = torch.Generator().manual_seed(0)
    found = []
    for length, frames in ((4, 3), (6, None), (3, 7)):
        ids = torch.randint(1, 57, (length,), generator=g)
        codes = None if frames is None else torch.randint(1, 32, (frames, BOOKS), generator=g)
        found.append(batch_of(ids, codes))
    two = [
        SpokenTurn(0, torch.full((2, BOOKS), 7), learnt=False),
        SpokenTurn(1, torch.full((3, BOOKS), 9)),
    ]
    return [*found, turns_of(torch.tensor([57, 5, 57, 6, 7]), two)]


def test_pack_of_csm_rows_equals_each_alone_with_every_gradient():
    model = csm()
    batches = rows()
    assert num_speech_labels(PackedBatch.concat(batches)) == 3 + 1 + 7 + 1 + 3 + 1
    gradients, outputs = [], []
    for group in ([PackedBatch.concat(batches)], batches):
        model.zero_grad()
        for batch in group:
            model(batch, ["speech_loss"])["speech_loss"].sum().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
        outputs.append(
            torch.cat([model(batch, ["speech_log_probs"])["speech_log_probs"] for batch in group])
        )
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    for name, packed in gradients[0].items():
        assert packed is not None, name
        torch.testing.assert_close(
            packed,
            gradients[1][name],
            rtol=1e-5,
            atol=1e-5,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def test_forward_and_backward_of_csm_read_no_value_of_the_device():
    batch = MovedBatch.of(PackedBatch.concat(rows()))
    assert device_reads(csm(), batch, ["speech_loss"]) == []


def test_csm_names_what_it_cannot_speak():
    protocol = SpeechProtocol.for_config(config())
    assert protocol is not None
    ids = torch.tensor([57, 5])
    codes = torch.zeros(2, BOOKS, dtype=torch.long)
    with pytest.raises(SpeechError, match=r"as \[0\]"):
        protocol.plan(ids, torch.arange(2), [SpokenTurn(0, codes, "ethan")])
    with user_error(r"csm writes no text: set model\.type=omni_model"):
        LanguageModel.from_config(config())
    with user_error("copies the codec from the folder"):
        OmniModel.on_meta(None, {"model_type": "csm", **settings()})


def test_mfu_and_estimate_of_csm_count_its_rows_of_speech():
    model = csm()
    batch = PackedBatch.concat(rows())
    with FlopCounterMode(display=False) as counter:
        model(batch, ["speech_loss"])["speech_loss"].sum().backward()
    assert float(MFUKit(model).flops(batch)) == pytest.approx(counter.get_total_flops(), rel=0.2)
    found = peak_memory(BlockCosts(model, PlanSettings(precision="bf16")), [batch], micro_batches=2)
    assert found["activations"] > 0
    assert found["loss"] > 0


# ---- Ranks --------------------------------------------------------------------------------------------------------


def gradients_of(layout, members):
    engine = OmniModelEngine(csm(), layout, Settings())
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    batches = [PackedBatch.concat([rows()[member] for member in one]) for one in members]
    engine.train_batch(batches, speech_step(engine.model))
    return {
        name: full_tensor(param.grad)
        for name, param in engine.model.named_parameters()
        if param.grad is not None
    }


def on_ranks(sizes):
    world = World.join("cpu")
    try:
        layout = Layout.of(world, parallel(**sizes))
        shares = [[[1]], [[0], [2, 1, 3]]]  # the first rank has no speech
        mine = [one for share in shares[layout.data_rank :: layout.data_size] for one in share]
        return gradients_of(layout, mine)
    finally:
        world.close()


@pytest.mark.slow
@CAMPAIGN
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"ulysses": 2, "replicate": 1}])
def test_ranks_of_csm_give_the_gradients_of_one(ranks2, sizes):
    wanted = gradients_of(alone(), [[1, 0, 2, 1, 3]])
    for found in ranks2.run(on_ranks, sizes):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(
                found[name], grad, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
