"""Images shared among the ranks of a sequence group: each encodes a part, and all have the features of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import parallel
from test_context_layouts import assert_equal, on_ranks
from tiny_models import build_model, samples

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.media.shared_media import items_by_rank, largest_share
from mvp_engine.model_engine import LanguageModelEngine, Settings


def test_items_by_rank_gives_each_item_once_and_balances_rows() -> None:
    row_counts = [16, 400, 64, 64, 16, 256, 64, 16]
    items = items_by_rank(row_counts, 2)
    assert sorted(item for of_rank in items for item in of_rank) == list(range(8))
    assert max(sum(row_counts[i] for i in of_rank) for of_rank in items) <= 456
    assert items_by_rank([4], 3) == [[0], [], []]


def test_largest_share_of_items_without_a_grid_is_all_of_them() -> None:
    counts = torch.tensor([8, 8, 8, 8])
    ids = torch.zeros(4, dtype=torch.long)
    grids = {"image_grid_thw": torch.tensor([[1, 2, 4]] * 4)}
    assert largest_share(Media(torch.zeros(32, 3), counts, ids, grids), 4) == 0.25
    assert largest_share(Media(torch.zeros(32, 3), counts, ids, grids), 8) == 0.25
    assert largest_share(Media(torch.zeros(32, 3), counts, ids), 4) == 1.0


def encoded_rows(name: str, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Rows that this rank's encoder got for each pack with images, and all rows of the pack."""
    world = World.join("cpu")
    model = build_model(LanguageModel, name)
    one = samples(model, name)[1]  # with an image
    engine = LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), Settings())
    engine.initialize()
    rows: list[int] = []
    visual: Any = engine.model.base().visual
    visual.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    found = []
    for images in (1, 2, 5):
        pack = PackedBatch.concat([one.select([0]) for _ in range(images)])
        rows.clear()
        with engine.eval_mode():
            engine.model(pack, ["log_probs"])
        found.append((sum(rows), len(pack.media["pixel_values"].values)))
    world.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 2}, {"ulysses": 2}], ids=str)
def test_ranks_of_a_sequence_group_encode_a_part_of_the_images_each(
    ranks2, sizes: dict[str, int]
) -> None:
    of_ranks = ranks2.run(encoded_rows, "qwen2_5_vl", sizes)
    for pack in range(3):
        rows = [of_rank[pack][0] for of_rank in of_ranks]
        total = of_ranks[0][pack][1]
        if pack == 0:  # one image: every rank encodes it
            assert rows == [total, total]
        else:
            assert sum(rows) == total > max(rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "names"),
    [
        (2, {"ulysses": 2}, ["qwen3_vl", "qwen2_5_vl", "glm4v"]),
        pytest.param(
            4,
            {"context": 2, "shard": 2},
            ["qwen2_vl", "qwen3_vl", "paddleocr_vl", "gemma3", "llava_next"],
            marks=pytest.mark.campaign(only=True),
        ),
        pytest.param(
            4,
            {"context": 2, "ulysses": 2},
            ["qwen2_vl", "qwen3_vl_moe", "video_llama_3", "gemma3", "paligemma"],
            marks=pytest.mark.campaign(only=True),
        ),
    ],
    ids=str,
)
def test_shared_encoders_give_the_outputs_and_gradients_of_one_rank(
    request, ranks: int, sizes: dict[str, int], names: list[str]
) -> None:
    for results in request.getfixturevalue(f"ranks{ranks}").run(on_ranks, names, sizes, {}):
        for name, result in results.items():
            assert_equal(result, name)
