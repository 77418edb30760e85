"""Ask an exported model, with nothing but transformers: python ask.py FOLDER QUESTION IMAGE [IMAGE]"""

import sys
from collections.abc import Iterable

from PIL import Image


def ask(folder: str, questions: Iterable[tuple[list[str], str]]) -> list[str]:
    """The answers to questions, each given as (image files, text)."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    answers = []
    for files, question in questions:
        content = [*({"type": "image"} for _ in files), {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        images = [Image.open(file).convert("RGB") for file in files]
        inputs = processor(text=[prompt], images=images, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        completion = output[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(completion, skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    print(ask(sys.argv[1], [(sys.argv[3:], sys.argv[2])])[0])
