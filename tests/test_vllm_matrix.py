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
RESULTS = ROOT / "benchmarks" / "results" / "vllm_matrix.json"


def markdown(table):
    """The table of docs/serving.md."""
    rows = table["rows"]
    lines = [
        f"vLLM {table['vllm']} (its transformers: {table['transformers_of_vllm']}), here transformers "
        f"{table['transformers']} and torch {table['torch'].partition('+')[0]}:",
        "",
        "| models | answers equal | with images | largest difference of a log-prob or score |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, title in KINDS.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        of_kind = [row for row in of_kind if "error" not in row and not row["first"]]
        names = ", ".join(row["model"].partition(",")[0] for row in of_kind)
        if of_kind:
            same, all_ = (sum(row[key] for row in of_kind) for key in ("same", "questions"))
            images = sum(row["with_images"] for row in of_kind)
            largest = max(row["largest"] for row in of_kind)
            lines.append(f"| {title}: {names} | {same} of {all_} | {images} | {largest:.1e} |")
    excepted = [row["model"] for row in rows if row.get("error") or row.get("first")]
    lines += ["", *(f"- {name}: {EXCEPTIONS[name]}" for name in excepted)] if excepted else []
    return "\n".join(lines) + "\n"


KINDS = {
    "text": "text",
    "moe": "mixture of experts",
    "vlm": "vision and language",
    "lora": "LoRA adapter, not merged",
    "merged": "LoRA adapter, merged by us",
    "reward": "reward model",
}
# Models that vLLM 0.32 does not load, or computes in another way.
OTHER_NAMES = "not loaded; transformers 5.22 writes the weights of its vision tower under other names than vLLM reads"
EXCEPTIONS = {
    "llava": OTHER_NAMES,
    "gemma3": OTHER_NAMES,
    "qwen3_vl_moe": "not loaded; transformers 5.22 writes the weights of experts transposed",
    "cohere2": "differs in sequences that are longer than the sliding window: vLLM's has one token more than "
    "transformers'",
}


def test_table_of_the_docs_is_that_of_the_data_file():
    page = (ROOT / "docs" / "serving.md").read_text()
    shown = page.partition("<!-- vllm -->\n")[2].partition("<!-- /vllm -->")[0]
    assert shown == markdown(json.loads(RESULTS.read_text()))


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


@pytest.mark.slow
@pytest.mark.campaign(only=True)
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs vLLM: make test-vllm")
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
    wrong = [row for row in wrong if row["model"] not in EXCEPTIONS]
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
