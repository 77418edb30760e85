"""`mvp export --gguf`: llama.cpp writes the same greedy tokens in float32, of text and of an image (make test-gguf).

MVP_LLAMA_CPP is a folder with llama.cpp's converter, MVP_XLLAMACPP_PYTHON a python that has xllamacpp.
"""

import base64
import io
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

CONVERTER = Path(os.environ.get("MVP_LLAMA_CPP", ROOT / ".venvs" / "gguf" / "llama.cpp"))
PYTHON = Path(os.environ.get("MVP_XLLAMACPP_PYTHON", ROOT / ".venvs" / "gguf" / "bin" / "python"))
NEW = 12
pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign(only=True),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (CONVERTER.exists() and PYTHON.exists()), reason="needs llama.cpp: make test-gguf"
    ),
]
# The converter knows the pre-tokenizers of released models by a hash. That of a tiny one is GPT-2's.
WRAPPER = """
import runpy, sys
sys.path[:0] = [{folder!r}, {folder!r} + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path({folder!r} + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama_cpp")
    text = WRAPPER.format(folder=str(CONVERTER.resolve()))
    (folder / "convert_hf_to_gguf.py").write_text(text)
    return folder


def by_llama_cpp(files, requests, work):
    """The answers of llama.cpp to requests of its server."""
    (work / "requests.json").write_text(json.dumps(requests))
    words = [files[0], files[1] if len(files) > 1 else "-", work / "requests.json"]
    command = [PYTHON, ROOT / "tests" / "gguf_runtime.py", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("ANSWERS"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gguf_of_a_text_model_writes_our_greedy_tokens(family, converter, tmp_path):
    from vllm_models import exported, questions

    from mvp_engine.tools.gguf import find_converter, write_gguf
    from mvp_engine.tools.verify import Subject

    torch.set_num_threads(1)
    folder = exported(family, tmp_path)
    files = write_gguf(folder, tmp_path / "out", "f32", find_converter(str(converter)), "tiny")
    assert [file.name for file in files] == ["tiny-f32.gguf"]
    subject = Subject.open(folder)
    ours = subject.answers(questions(family))
    requests = [
        {
            "prompt": one.prompt,
            "n_predict": len(one.tokens),
            "temperature": 0,
            "return_tokens": True,
        }
        for one in ours
    ]
    theirs = by_llama_cpp(files, requests, tmp_path)
    for one, other in zip(ours, theirs, strict=True):
        assert without_stop(other["tokens"], subject) == without_stop(one.tokens, subject)
        assert len(one.tokens) > 2


def without_stop(tokens, subject):
    return tokens[:-1] if tokens and tokens[-1] in subject.stop else tokens


def test_gguf_of_qwen2_5_vl_writes_our_greedy_answer_to_an_image(converter, tmp_path):
    import vllm_models

    from mvp_engine.tools.gguf import find_converter, write_gguf
    from mvp_engine.tools.verify import Subject

    torch.set_num_threads(1)
    folder = vllm_models.exported("qwen2_5_vl_14", tmp_path)
    files = write_gguf(folder, tmp_path / "out", "f32", find_converter(str(converter)), "tiny")
    assert [file.name for file in files] == ["tiny-f32.gguf", "mmproj-tiny-f32.gguf"]
    subject = Subject.open(folder)
    asked = []
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(
            0, 255, (112, 112 + 28 * seed, 3), dtype=np.uint8
        )
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        image = {"type": "image_url", "image_url": {"url": uri}}
        content = [image, {"type": "text", "text": "what colour is this?"}]
        asked.append({"messages": [{"role": "user", "content": content}]})
    ours = subject.answers(asked)
    # The placeholders are banned from ours.
    bias = [[token, False] for token in subject.engine.model.placeholders]
    options = {"max_tokens": NEW, "temperature": 0, "logprobs": True, "logit_bias": bias}
    theirs = by_llama_cpp(files, [one | options for one in asked], tmp_path)
    texts = set()
    for one, other in zip(ours, theirs, strict=True):
        tokens = [entry["id"] for entry in other["choices"][0]["logprobs"]["content"]]
        expected = without_stop(one.tokens[:NEW], subject)
        assert without_stop(tokens, subject)[: len(expected)] == expected
        texts.add(tuple(tokens))
    assert len(texts) == 3
