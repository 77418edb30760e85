"""`mvp export --verify`: another library reads an export as we do, and what differs is named."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import mvp
from run_files import printed_json
from tiny_vlm import saved_model, write_image

from mvp_engine.tools import verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one LoRA step on rows with and without images."""
    work = tmp_path_factory.mktemp("verify")
    rows = []
    for index in range(6):
        content = [{"type": "text", "text": f"What is {index}?"}]
        if index % 2:
            file = write_image(work / f"{index}.png", 16, 24, index)
            content.insert(0, {"type": "image", "image": file})
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "four"}]
        rows.append({"messages": turns})
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"train sft/lora model.path={saved_model(work)} data.sources.rows.path={work}/rows.jsonl"
    )
    words += f" output_dir={work} run_id=run device=cpu train.max_steps=1 train.epochs=null"
    words += (
        " data.pack_tokens=256 data.global_batch_tokens=256 data.num_workers=0 log.backends=[jsonl]"
    )
    assert mvp(words) == 0
    return work / "run"


def test_export_verify_finds_the_same_prompts_tokens_and_log_probs(run, tmp_path, capsys):
    capsys.readouterr()
    assert mvp(f"export {run} --verify transformers --json") == 0
    figures = printed_json(capsys)
    assert figures["same"] == figures["questions"] == 6
    assert figures["with_images"] == 3
    assert figures["tokens"] > 20
    assert figures["largest"] < 1e-4
    assert mvp(f"export {run} {tmp_path}/adapter --adapter --verify peft") == 0
    assert "peft: 6 of 6 answers equal (3 with images" in capsys.readouterr().out
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda one: replace(one, tokens=[*one.tokens[:2], 7, *one.tokens[3:]]),
            "greedy token 2 is",
        ),
        (lambda one: replace(one, tokens=one.tokens[:3]), "greedy tokens here and 3 there"),
        (lambda one: replace(one, prompt=[9, *one.prompt[1:]]), "prompt token 0 is"),
        (lambda one: replace(one, log_probs=[x + 0.01 for x in one.log_probs]), "log-prob"),
    ],
)
def test_export_verify_names_the_first_difference(run, monkeypatch, capsys, change, message):
    ours = verify.Subject.answers

    def theirs(subject, questions):
        return [change(one) for one in ours(subject, questions)]

    monkeypatch.setattr(verify, "by_transformers", theirs)
    assert mvp(f"export {run} --verify transformers") == 2
    shown = capsys.readouterr()
    assert "0 of 6 answers equal" in shown.out
    assert "question 0 (" in shown.err
    assert message in shown.err


def test_export_verify_user_errors_name_the_fix(run, tmp_path, capsys):
    for words, message in (
        ("--verify vllm --python /none", "give the path of a python"),
        ("--verify vllm", "has no vLLM: pip install"),
        ("--verify peft", "add --adapter"),
        ("--adapter --verify transformers", "leave --adapter out"),
        ("--verify transformers --python x", "--python is for --verify vllm"),
        (f"{tmp_path}/g --gguf f16", "pip download llama-cpp-python"),
        (f"{tmp_path}/g --gguf f16 --llama-cpp {tmp_path}", "there is no convert_hf_to_gguf.py"),
        ("--verify transformers --llama-cpp x", "--llama-cpp is for --gguf"),
    ):
        assert mvp(f"export {run} {words}") == 2, words
        assert message in capsys.readouterr().err


def test_transformers_of_another_model_are_found_to_differ(run, monkeypatch, capsys):
    from transformers import Qwen3VLForConditionalGeneration

    load = Qwen3VLForConditionalGeneration.from_pretrained

    def broken(*args, **options):
        model = load(*args, **options)
        with torch.no_grad():
            model.get_input_embeddings().weight[40:80] *= -1
        return model

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "from_pretrained", broken)
    assert mvp(f"export {run} --verify transformers") == 2
    assert "question 0" in capsys.readouterr().err
