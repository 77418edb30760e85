"""`mvp chat` on each family of the data kit, with each kind of media: tokens equal transformers' own."""

import pytest
from families import KIT
from processors import chat_processor
from test_families_kit import file_of, model_of, opened
from test_media import processor_outputs
from transformers import AutoModelForMultimodalLM

from mvp_engine.kit.decoding import Decoding
from mvp_engine.tools.chat import ChatModel

NEW = 8
DECODING = Decoding(NEW)


def own_tokens(model, processor, content, media, stop):
    """The answer of transformers alone."""
    template = processor.chat_template
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(
        messages, template, tokenize=False, add_generation_prompt=True
    )
    given = processor_outputs(
        processor, text, [info for info, _ in media], [item for _, item in media]
    )
    options = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": sorted(stop),
        "pad_token_id": 0,
    }
    return model.generate(**given, **options)[0, given["input_ids"].shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", KIT)
def test_chat_tokens_equal_transformers_generate(name, tmp_path):
    processor = chat_processor(name.removesuffix("_thinker"))
    folder = tmp_path / "model"
    model_of(name, processor).hf.save_pretrained(folder)
    processor.save_pretrained(folder)
    chat = ChatModel(folder, device="cpu")
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    text = {"type": "text", "text": "What is this?"}
    assert chat.answer([{"role": "user", "content": "Hello."}], DECODING).tokens == own_tokens(
        model, processor, "Hello.", [], chat.stop
    )
    for i, kind in enumerate(KIT[name].split(", ")):
        file = file_of(tmp_path, kind, i)
        paths = (
            [str(tmp_path / one) for one in file]
            if isinstance(file, list)
            else str(tmp_path / file)
        )
        content = [{"type": kind, kind: paths, "fps": 2.0}, text]
        expected = own_tokens(
            model, processor, [{"type": kind}, text], [opened(tmp_path, kind, file)], chat.stop
        )
        assert chat.answer([{"role": "user", "content": content}], DECODING).tokens == expected
