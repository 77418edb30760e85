"""`mvp chat`: answers equal transformers' own, for folders, adapters and runs; media, streaming, errors."""

import io
import json

import pytest
import torch
from conftest import mvp
from lora_models import engine_of
from PIL import Image
from run_files import printed_json

from mvp_engine.cli import main
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor
from mvp_engine.tools.chat import ChatModel

TEXTS = ["What colour is this? red green blue", "user assistant system\n"]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-VL with its processor, and weights that make answers differ from prompt to prompt."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    processor = make_qwen3_vl_processor(TEXTS, 300)
    tokenizer = processor.tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 8,
    }
    vision |= {
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
        for kind in ("image", "video")
    }
    ids |= {
        f"vision_{end}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>")
        for end in ("start", "end")
    }
    config = read_config(
        None, {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, **ids}
    )
    torch.manual_seed(0)
    LanguageModel.from_config(config).hf.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    file = tmp_path_factory.mktemp("images") / "red.png"
    Image.new("RGB", (32, 24), "red").save(file)
    return file


def theirs(folder, messages, model=None):
    """The answer of transformers alone."""
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = model or AutoModelForMultimodalLM.from_pretrained(folder)
    options = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
    }
    inputs = processor.apply_chat_template(messages, **options)
    stop = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    bad = [[token] for token in (model.config.image_token_id, model.config.video_token_id)]
    given = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": stop,
        "bad_words_ids": bad,
    }
    written = model.generate(**inputs, **given, pad_token_id=0)[0, inputs["input_ids"].shape[1] :]
    return str(processor.decode(written, skip_special_tokens=True))


def with_image(image, text):
    return [
        {
            "role": "user",
            "content": [{"type": "image", "image": str(image)}, {"type": "text", "text": text}],
        }
    ]


def test_chat_answers_equal_transformers_generate(folder, image):
    model = ChatModel(folder, device="cpu")
    first = with_image(image, "What colour?")
    turns = [*first, {"role": "assistant", "content": "red"}, {"role": "user", "content": "green?"}]
    for messages in (first, turns, [{"role": "user", "content": "blue"}]):
        pieces = []
        completion = model.answer(messages, Decoding(NEW), pieces.append)
        text = model.text(completion.tokens)
        assert text == theirs(folder, messages)
        assert "".join(pieces) == text
        assert len(pieces) > 1


def test_chat_streams_an_answer_that_ends_within_a_character(folder, monkeypatch):
    model = ChatModel(folder, device="cpu")
    monkeypatch.setattr(model, "text", lambda tokens: "ab\ufffd"[: len(tokens)])
    pieces = []
    model.answer([{"role": "user", "content": "blue"}], Decoding(3), pieces.append)
    assert pieces == ["a", "b", "\ufffd"]


def test_chat_adapter_equals_peft(folder, image, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    engine = engine_of(folder, Lora(rank=2, target_modules=["llm"]))
    for name, param in engine.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param.data, std=0.5)
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    messages = with_image(image, "What colour?")
    model = ChatModel(folder, tmp_path / "adapter", device="cpu")
    text = model.text(model.answer(messages, Decoding(NEW)).tokens)
    peft = PeftModel.from_pretrained(
        AutoModelForMultimodalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    assert text == theirs(folder, messages, peft)
    assert text != theirs(folder, messages)


def test_chat_command_prints_text_or_json(folder, image, capsys):
    words = [
        "chat",
        str(folder),
        "--device",
        "cpu",
        "--max-new-tokens",
        str(NEW),
        "--image",
        str(image),
    ]
    assert main([*words, "-p", "What colour?"]) == 0
    printed = capsys.readouterr().out
    assert printed == theirs(folder, with_image(image, "What colour?")) + "\n"
    assert main([*words, "-p", "What colour?", "--json"]) == 0
    record = printed_json(capsys)
    assert record["answer"] + "\n" == printed
    assert 1 <= record["tokens"] <= NEW


def test_chat_reads_lines_of_one_conversation(folder, image, capsys, monkeypatch):
    lines = [f"/image {image}", "What colour?", "/reset", "blue", "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert mvp(f"chat {folder} --device cpu --max-new-tokens {NEW} --json") == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["messages"][0]["content"][0]["type"] == "image"
    assert second["messages"] == [{"role": "user", "content": "blue"}]


def test_chat_answer_ends_before_a_stop_string(folder, monkeypatch):
    model = ChatModel(folder, device="cpu", stop_strings=["two", "never"])
    words = ["one ", "t", "w", "ice ", "tw", "o and", " more"]
    monkeypatch.setattr(
        model.tokenizer, "decode", lambda tokens, **_: "".join(words[: len(tokens)])
    )
    pieces = []
    completion = model.answer([{"role": "user", "content": "blue"}], Decoding(7), pieces.append)
    assert len(completion.tokens) == 6
    assert completion.is_finished
    assert pieces == ["one ", "twice "]  # a text that may begin a stop string waits


def test_chat_ctrl_c_ends_the_answer_and_keeps_what_was_shown(folder, capsys, monkeypatch):
    conversations = []

    def answer(self, messages, decoding, on_text):
        conversations.append(list(messages))
        on_text("half")
        raise KeyboardInterrupt

    lines = iter(["one", "two", "/exit"])
    monkeypatch.setattr(ChatModel, "answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert mvp(f"chat {folder} --device cpu") == 0
    assert "half ...\n" in capsys.readouterr().out
    assert [message["content"] for message in conversations[1]] == ["one", "half", "two"]
    assert mvp(f"chat {folder} --device cpu -p one") == 130


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere", "-p", "x"], "no run 'nowhere'"),
        (
            ["EMPTY", "-p", "x"],
            "has no checkpoint yet, and is neither a Hugging Face folder (config.json)",
        ),
        (["FOLDER", "-p", "x", "--image", "none.png"], "no image file none.png"),
        (["FOLDER", "-p", "x", "--audio", "IMAGE"], "audio"),
        (["FOLDER", "-p", "x", "--device", "gpu"], "no device 'gpu': write cpu, cuda"),
        (["FOLDER", "-p", "x", "--top-p", "2"], "top_p=2.0: must be more than 0"),
    ],
)
def test_chat_user_errors_are_explained(folder, image, words, message, capsys):
    places = {"FOLDER": str(folder), "IMAGE": str(image), "EMPTY": str(image.parent)}
    assert mvp("chat --device cpu", *(places.get(word, word) for word in words)) == 2
    assert message in capsys.readouterr().err
