"""Fuzzed rows, most of them odd or bad, from the file to the packs: each is trained on once or listed as bad."""

from collections import Counter

import pytest
from fuzz import ANY, Fuzz
from processors import chat_processor
from run_files import json_lines

from mvp_engine.kit import MLLMData, MLLMDataKit

WORKERS = 2


@pytest.mark.slow
@pytest.mark.campaign
def test_data_kit_fuzzed_rows_are_trained_on_once_or_listed_with_their_reason(
    tmp_path, campaign_size
):
    folder = tmp_path / "in" / "data"
    folder.mkdir(parents=True)
    lines = Fuzz(folder).lines(campaign_size(700, 20_000))
    # Some blank.
    text = b"".join(
        line + (b"\r\n\n" if i % 50 == 7 else b"\n") for i, (line, _) in enumerate(lines)
    )
    (folder / "rows.jsonl").write_bytes(text)
    settings = MLLMData.model_validate(
        {
            "sources": [{"path": str(folder / "rows.jsonl")}],
            "pack_tokens": 8192,
            "global_batch_tokens": 8192,
            "max_bad_rows": 1.0,
            "limits": {"allow_outside": False},
            "cache": str(tmp_path / "cache"),
        }
    )
    kit = MLLMDataKit(settings, chat_processor("qwen2_5_omni"), num_workers=WORKERS)
    batches = kit.loader("train", folder=tmp_path)
    trained = Counter(
        sample
        for batch in batches
        for sample in batch.sequence_fields["sample"].tolist()
        if sample >= 0
    )
    listed = json_lines(tmp_path / "bad_rows.jsonl")
    reasons = {record["where"]: record["reason"] for record in listed}
    assert len(reasons) == len(listed)  # each is listed once
    wrong, blank = [], 0
    for i, (line, expected) in enumerate(lines):
        reason = reasons.pop(f"rows.jsonl:{i + 1 + blank}", None)
        blank += i % 50 == 7
        fine = trained.pop(i, 0) == (reason is None)
        if not fine or expected not in (ANY, reason):
            wrong.append((line[:200], expected, reason))
    assert not wrong, wrong[:20]
    assert not reasons  # nothing else was listed or trained on
    assert not trained
