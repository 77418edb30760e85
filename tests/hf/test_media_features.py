"""Encoders and their features without host syncs: bit-equal to transformers, or within rounding of a matmul."""

import copy
from contextlib import nullcontext

import pytest
import torch
from conftest import user_error
from families import VISION, config_of
from tiny_engines import assert_equal
from tiny_models import build_model, run, samples, shared_model
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.media import encoders, media_features
from mvp_engine.hf.model import attention, input_hooks
from mvp_engine.kit.data.encode.row_encoder import RopePositions
from mvp_engine.model_engine.fsdp.lockstep import LockstepBatch, append_dummies
from mvp_engine.ops import attention as attention_ops


def images_in_text(config, grids):
    """Images of these grid sizes among text: as a packed batch, and as inputs of transformers' forward."""
    g = torch.Generator().manual_seed(0)
    grid = torch.tensor(grids)
    sizes = grid.prod(-1)
    ids = [torch.randint(10, 60, (5,), generator=g)]
    for size in sizes.tolist():
        image = [config.vision_start_token_id, *[config.image_token_id] * (size // 4)]
        ids += [torch.tensor(image), torch.randint(10, 60, (3,), generator=g)]
    row = torch.cat(ids)
    values = torch.randn(int(sizes.sum()), 24, generator=g)
    no_sequence = torch.zeros(len(grid), dtype=torch.long)
    media = {"pixel_values": Media(values, sizes, no_sequence, {"image_grid_thw": grid})}
    types = (row == config.image_token_id).long()
    positions = RopePositions(config)(row, {"mm_token_type_ids": types}, media)
    batch = PackedBatch.from_sequences([row], position_ids=[positions], media=media)
    theirs = {"input_ids": row[None], "pixel_values": values, "image_grid_thw": grid}
    return batch, {**theirs, "mm_token_type_ids": types[None]}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_vl", "qwen2_5_vl"])
def test_language_model_with_image_grids_equals_transformers(name):
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    config = config_of(name)
    for part in (config.vision_config, config.get_text_config()):
        part.initializer_range = 0.2  # so that images change the outputs
    kind = AutoModelForImageTextToText
    plain = kind.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = LanguageModel.from_config(copy.deepcopy(config)).eval()
    ours.hf.load_state_dict(plain.state_dict())
    one, three = [[1, 4, 8]], [[1, 4, 4], [1, 8, 4], [1, 4, 4]]
    with torch.no_grad():
        for grids in (one, three, one):  # the last size is cached by then
            batch, inputs = images_in_text(config, grids)
            log_p = plain(**inputs).logits[0].log_softmax(-1)[:-1]
            expected = log_p.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
            found = ours(batch, ["log_probs"])["log_probs"][:-1]
            assert torch.allclose(found, expected, atol=1e-5)
        batch.media["pixel_values"].values.mul_(-1)
        changed = ours(batch, ["log_probs"])["log_probs"][:-1]
    assert not torch.allclose(changed, expected, atol=1e-3)


def test_patch_conv3d_equals_conv3d_with_gradients():
    plain = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    wrapped = nn.Sequential(copy.deepcopy(plain))
    encoders.apply_sync_free_vision(wrapped)
    assert type(wrapped[0]) is encoders.PatchConv3d
    for size in ((2, 4, 4), (4, 8, 4)):  # the second is not a single patch
        x = torch.randn(5, 3, *size)
        a, b = plain(x), wrapped(x)
        assert torch.allclose(a, b, atol=1e-6)
        for out, model in ((a, plain), (b, wrapped)):
            model.zero_grad()
            out.square().sum().backward()
        for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    overlapping = nn.Sequential(nn.Conv3d(3, 8, 3, 1))
    encoders.apply_sync_free_vision(overlapping)
    assert type(overlapping[0]) is nn.Conv3d


def test_grid_plans_past_the_limit_are_dropped(monkeypatch):
    config = config_of("qwen3_vl")
    model = build_model(LanguageModel, "qwen3_vl")
    encoder = model.hf.model.visual
    monkeypatch.setattr(encoders, "MAX_PLANS", 2)
    for grids in ([[1, 4, 4], [1, 4, 8]], [[1, 4, 4]], [[1, 8, 8]]):
        model(images_in_text(config, grids)[0], ["log_probs"])
    assert len(encoders._PLANS[encoder]) == 1


def test_placeholder_mask_masked_scatter_equals_plain_mask_with_gradients():
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(1, 30, 1, generator=g) > 0.6
    embeds = torch.randn(1, 30, 8, generator=g)
    features = torch.randn(int(mask.sum()), 8, generator=g)
    d = torch.randn(1, 30, 8, generator=g)
    found = []
    with_host_copy = media_features.PlaceholderMask.of(mask, mask)
    for kind in (mask, with_host_copy):
        into, rows = embeds.clone().requires_grad_(), features.clone().requires_grad_()
        for one in (kind, kind.expand_as(into)):
            out = into.masked_scatter(one, rows)
            out.backward(d)
        found.append((out, into.grad, rows.grad))
    assert all(map(torch.equal, *found))
    assert type((with_host_copy | mask)[..., 0]) is Tensor
    assert type(embeds[..., :1].expand_as(with_host_copy)) is Tensor


def test_placeholder_mask_token_count_mismatch_raises_on_host():
    config = config_of("qwen3_vl")
    model = shared_model(LanguageModel, "qwen3_vl")
    batch, _ = images_in_text(config, [[1, 4, 4], [1, 4, 8]])
    masks = model.base().get_placeholder_mask(batch.input_ids[None], torch.zeros(1, 1, 1))
    assert type(masks[0]) is Tensor
    moved = batch.to("cpu")  # as to a GPU: the host keeps the token ids
    assert moved.host_input_ids is batch.input_ids
    batch.input_ids[batch.input_ids == config.image_token_id] = 11
    with pytest.raises(ValueError, match="do not match"):
        model(batch, ["log_probs"])


@pytest.mark.parametrize("count", [4, 5, 6])
def test_insert_features_wrong_number_of_audio_tokens_raises(count):
    """transformers does not compare the two for audio."""
    model = shared_model(LanguageModel, "qwen2_5_omni_thinker")
    fields = {"feature_attention_mask": (torch.arange(32) < 20).long()[None]}
    audio = Media(torch.randn(1, 8, 32), torch.tensor([1]), torch.tensor([0]), fields)
    row = torch.tensor([11, *[92] * count, 12])
    positions = [torch.arange(len(row)).expand(3, -1)]
    media = {"input_features": audio}
    batch = PackedBatch.from_sequences([row], position_ids=positions, media=media)
    with nullcontext() if count == 5 else user_error(f"{count} tokens .* returned 5 features"):
        model(batch, ["log_probs"])


def test_placeholder_mask_over_token_ids_stays_a_plain_mask():
    class Codes(nn.Module):  # like models that turn images into token ids
        def get_placeholder_mask(self, input_ids, image_ids):
            assert int((input_ids == 9).sum()) == len(image_ids)
            return input_ids == 9

    model, ids = Codes(), torch.tensor([[1, 9, 9, 2]])
    media_features.apply_sync_free_features(model, model)
    media_features.register_host_ids(ids, ids[0])
    image_ids = torch.tensor([5, 6])
    mask = model.get_placeholder_mask(ids, image_ids)
    assert ids.masked_scatter(mask, image_ids).tolist() == [[1, 5, 6, 2]]


def test_host_input_ids_changed_after_the_copy_are_not_used():
    def moved():
        ids = torch.arange(6)
        return ids, PackedBatch.from_sequences([ids]).to("meta")  # as to a GPU

    ids, batch = moved()
    assert batch.host_input_ids.tolist() == ids.tolist()
    assert batch.to("meta").host_input_ids is batch.host_input_ids
    batch.host_input_ids.add_(1)
    assert batch.host_input_ids is None
    ids, batch = moved()
    batch.input_ids[0] = 3
    assert batch.host_input_ids is None
    ids, batch = moved()
    batch.input_ids = batch.input_ids.clone()
    assert batch.host_input_ids is None


def test_placeholder_mask_in_compiled_model_uses_transformers_method():
    class Net(nn.Module):
        def get_placeholder_mask(self, input_ids, inputs_embeds):
            return (input_ids == 9)[..., None].expand_as(inputs_embeds)

        def forward(self, ids, embeds, features):
            mask = self.get_placeholder_mask(ids, embeds)
            return embeds.masked_scatter(mask, features) + mask[..., :1]

    model, ids = Net(), torch.tensor([[1, 9, 9, 2]])
    media_features.apply_sync_free_features(model, model)
    media_features.register_host_ids(ids, ids[0])
    given = (ids, torch.zeros(1, 4, 3), torch.randn(2, 3))
    expected = model(*given)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*given), expected)


def test_placeholder_mask_of_deepcopy_is_bound_to_the_copy():
    model = shared_model(LanguageModel, "qwen3_vl")
    twin = copy.deepcopy(model)
    assert twin.base().__dict__["get_placeholder_mask"].args[0] is twin.base()


@pytest.mark.parametrize("name", VISION)
def test_host_token_ids_give_bit_equal_outputs_and_gradients(name, monkeypatch):
    model = shared_model(LanguageModel, name)
    batch = PackedBatch.concat(samples(model, name))
    (log_probs,), grads = run(model, batch, ["log_probs"])
    # So masks come from the device.
    monkeypatch.setattr(media_features, "register_host_ids", lambda *_: None)
    (expected,), expected_grads = run(model, batch, ["log_probs"])
    assert torch.equal(log_probs, expected)
    assert_equal(grads, expected_grads)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "llava"])
def test_forward_backward_with_media_has_no_host_sync(monkeypatch, name):
    """The meta device stands for a GPU: it has no values, so reading one is an error."""

    def kernel(q, k, v, *_):
        grouped = len(q) != len(k)
        attend = nn.functional.scaled_dot_product_attention
        return attend(q[None], k[None], v[None], enable_gqa=grouped)[0]

    monkeypatch.setattr(attention_ops, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(attention_ops, "_torch_varlen_is_supported", lambda *_: True)
    monkeypatch.setattr(attention_ops, "_torch_varlen", kernel)
    monkeypatch.setattr(attention, "_as_autocast", lambda x: x)
    monkeypatch.setattr(input_hooks, "autocast_dtype", lambda _: None)
    model = build_model(LanguageModel, name)
    text, image, both = samples(model, name)
    model.to("meta")
    assert len(both.media) == (2 if name == "qwen3_vl" else 1)
    for batch in (PackedBatch.concat([both, image]), append_dummies(text, [both])):
        moved = batch.to("meta")
        joined = moved.join() if isinstance(moved, LockstepBatch) else moved
        hidden = model.hidden(joined)
        hidden[: batch.num_tokens].sum().backward()
        assert len(hidden) >= batch.num_tokens
