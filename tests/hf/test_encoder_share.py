"""Images shared among the ranks of a sequence group: each encodes a part, and all have the features of one rank."""

import pytest
import torch
from test_context_layouts import assert_outputs_and_gradients, stepped_all
from tiny_engines import CAMPAIGN, engine_of
from tiny_models import build_model, samples

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.media.shared_media import items_by_rank, largest_share


def test_items_by_rank_gives_each_item_once_and_balances_rows():
    row_counts = [16, 400, 64, 64, 16, 256, 64, 16]
    items = items_by_rank(row_counts, 2)
    assert sorted(item for of_rank in items for item in of_rank) == list(range(8))
    assert max(sum(row_counts[i] for i in of_rank) for of_rank in items) <= 456
    assert items_by_rank([4], 3) == [[0], [], []]


def test_largest_share_of_items_without_a_grid_is_all_of_them():
    values = torch.zeros(32, 3), torch.tensor([8] * 4), torch.zeros(4, dtype=torch.long)
    with_grids = Media(*values, {"image_grid_thw": torch.tensor([[1, 2, 4]] * 4)})
    assert largest_share(with_grids, 4) == largest_share(with_grids, 8) == 0.25
    assert largest_share(Media(*values), 4) == 1.0


def encoded_rows(layout, name):
    """Rows that this rank's encoder got for each pack with images, and all rows of the pack."""
    model = build_model(LanguageModel, name)
    image = samples(model, name)[1]
    engine = engine_of(model, layout, optimizer=None)
    rows = []
    visual = engine.model.base().visual
    visual.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    found = []
    for images in (1, 2, 5):
        pack = PackedBatch.concat([image.select([0]) for _ in range(images)])
        rows.clear()
        with engine.eval_mode():
            engine.model(pack, ["log_probs"])
        found.append((sum(rows), len(pack.media["pixel_values"].values)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 2}, {"ulysses": 2}], ids=str)
def test_ranks_of_a_sequence_group_encode_a_part_of_the_images_each(on_ranks, sizes):
    single, *packs = zip(*on_ranks(sizes, encoded_rows, "qwen2_5_vl"), strict=True)
    assert all(rows == total for rows, total in single)  # one image: every rank encodes it
    for (first, total), (second, _) in packs:
        assert first + second == total > max(first, second) > 0


ON_FOUR = ["qwen2_vl", "qwen3_vl", "paddleocr_vl", "gemma3", "llava_next"]
SPLIT_TWICE = ["qwen2_vl", "qwen3_vl_moe", "video_llama_3", "gemma3", "paligemma"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, names",
    [
        ({"ulysses": 2}, ["qwen3_vl", "qwen2_5_vl", "glm4v"]),
        pytest.param({"context": 2, "shard": 2}, ON_FOUR, marks=CAMPAIGN),
        pytest.param({"context": 2, "ulysses": 2}, SPLIT_TWICE, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_shared_encoders_give_the_outputs_and_gradients_of_one_rank(on_ranks, sizes, names):
    for results in on_ranks(sizes, stepped_all, names):
        for name, result in results.items():
            assert_outputs_and_gradients(result, name)
