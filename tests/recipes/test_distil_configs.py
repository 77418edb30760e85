"""The distil recipe: its GPU configs compose, and rows that do not fit are refused."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import ROOT

from mvp_engine.config import compose
from mvp_engine.errors import UserError

CONFIGS = ROOT / "recipes" / "distil" / "configs"


@pytest.mark.parametrize("name", ["gpu1", "gpu8"])
def test_distil_gpu_configs_compose(name: str) -> None:
    given = ["model.path=x", "distil.teacher=y", "mllm.sources.rows.path=z.jsonl"]
    config: Any = compose(CONFIGS / f"{name}.yaml", given).config
    assert (config.distil.teacher, config.parallel.shard) == ("y", 8 if name == "gpu8" else 1)
    with pytest.raises(UserError, match="distillation reads rows with one answer"):
        compose(CONFIGS / f"{name}.yaml", [*given, "mllm.pairs=true"])
