"""Exports in vLLM: the greedy tokens and log-probs of each family equal ours, in float32 on a CPU (make test-vllm).

MVP_VLLM_PYTHON is the python that has vLLM; MVP_VLLM_RESULTS, if set, the file that gets the table as JSON.
"""

import importlib.metadata
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

PYTHON = os.environ.get("MVP_VLLM_PYTHON", str(ROOT / ".venvs" / "vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign(only=True),
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs vLLM: make test-vllm"),
]


def cases(work):
    """(name, subject, questions) of every model that vLLM is asked to load."""
    from vllm_models import FAMILIES, MOE_FAMILIES, VLM_FAMILIES, exported, questions, with_adapter

    from mvp_engine.tools.verify import Subject

    chosen = os.environ.get("MVP_VLLM_FAMILIES", "").split() or [*FAMILIES, "lora", "reward"]
    for family in chosen:
        if family in FAMILIES:
            kind = "vlm" if family in VLM_FAMILIES else "moe" if family in MOE_FAMILIES else "text"
            yield family, kind, Subject.open(exported(family, work)), questions(family)
    if "lora" in chosen:
        for family in ("qwen3", "llama", "qwen3_vl"):
            base, adapter, merged = with_adapter(family, work / "lora")
            asked = questions(family)
            yield f"{family}, adapter", "lora", Subject.open(base, adapter), asked
            yield f"{family}, merged", "merged", Subject.open(merged), asked
    if "reward" in chosen:
        for family in ("qwen3", "llama"):
            folder = exported(family, work / "reward", "value_model")
            subject = Subject.open(folder)
            ids = [[1, 7, 9, 30, 2], [1, 44, 5]]
            yield f"{family}, reward model", "reward", subject, [{"ids": one} for one in ids]


def test_exports_of_all_families_are_read_by_vllm_as_by_us(tmp_path):
    from mvp_engine.tools.verify import by_vllm, compare

    torch.set_num_threads(1)
    (tmp_path / "lora").mkdir()
    (tmp_path / "reward").mkdir()
    asked = list(cases(tmp_path))
    start = time.perf_counter()
    found = by_vllm([subject.job(questions) for _, _, subject, questions in asked], PYTHON)
    seconds = time.perf_counter() - start
    rows = []
    for (name, kind, subject, questions), theirs in zip(asked, found, strict=True):
        row = {"model": name, "kind": kind}
        if isinstance(theirs, str):
            rows.append({**row, "error": theirs})
            continue
        figures = compare(subject.answers(questions), theirs, questions)
        rows.append({**row, **vars(figures)})
    table = {"vllm": version_in("vllm"), "transformers_of_vllm": version_in("transformers")}
    table |= {
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
    }
    table |= {"seconds": round(seconds), "rows": rows}
    if results := os.environ.get("MVP_VLLM_RESULTS"):
        Path(results).write_text(json.dumps(table, indent=1) + "\n")
    wrong = [row for row in rows if row.get("error") or row.get("first")]
    assert not wrong, "\n".join(
        f"{row['model']}: {row.get('error') or row['first']}" for row in wrong
    )


def version_in(name):
    code = (
        "import importlib.metadata as m\n"
        f"found = [d.version for d in m.distributions() if d.name in ('{name}', '{name}-cpu')]\n"
        "print(found[0])"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
