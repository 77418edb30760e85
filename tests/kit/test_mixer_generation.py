"""Generation by models with mixers: greedy completions equal those of transformers' generate."""

import pytest
import torch
from conftest import CAMPAIGN, user_error
from mixer_families import MIXERS, mixer_model
from transformers import DynamicCache

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.kv_cache import KVCache
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.model_engine import LanguageModelEngine

WITHOUT_CACHE = {"recurrent_gemma", "rwkv", "xlstm"}
QUICK = ["qwen3_5_text", "nemotron_h", "lfm2_moe", "mamba", "minimax", "rwkv"]


def campaign(name):
    return pytest.param(name, marks=[] if name in QUICK else CAMPAIGN)


@pytest.mark.parametrize("name", [campaign(name) for name in MIXERS])
def test_complete_with_mixer_states_equals_transformers_generate(name):
    model = mixer_model(name)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 90, (length,), generator=generator) for length in (7, 1, 12, 7)]
    with attention.eager_attention(model.hf.config):
        # These have a cache of their own, which transformers' generate does not fill from a prompt of one token.
        how = {
            "use_cache": name not in WITHOUT_CACHE,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        found = [model.hf.generate(ids[None], max_new_tokens=5, **how) for ids in prompts]
    expected = [out[0, len(ids) :].tolist() for out, ids in zip(found, prompts, strict=True)]
    engine = LanguageModelEngine(model, Layout(World.join("cpu")))
    engine.initialize()
    # Since transformers 5.21; MiniMax had its own before.
    has_states = name == "minimax" or hasattr(DynamicCache, "get_conv_state")
    assert model.can_cache == (has_states and name not in WITHOUT_CACHE)
    completions = complete(engine, PackedBatch.from_sequences(prompts), Decoding(5, samples=2))
    assert [one.tokens for one in completions] == [tokens for tokens in expected for _ in range(2)]


def test_kv_cache_for_mixers_without_states_is_refused():
    model = mixer_model("rwkv")
    with user_error("call it without a KV cache"):
        model(
            PackedBatch.from_sequences([torch.arange(3, 9)]),
            ["next_logits"],
            kv_cache=KVCache([6], 1),
        )
