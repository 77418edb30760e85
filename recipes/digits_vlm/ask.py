"""Ask an exported model, with nothing but transformers: python ask.py FOLDER QUESTION PICTURE [PICTURE]"""

import sys
from collections.abc import Iterable

from PIL import Image


def ask(folder: str, questions: Iterable[tuple[list[str], str]]) -> list[str]:
    """The answers to questions, each with its pictures."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    answers = []
    for pictures, question in questions:
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        images = [Image.open(picture).convert("RGB") for picture in pictures]
        inputs = processor(text=[prompt], images=images, return_tensors="pt")
        written = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(written, skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    print(ask(sys.argv[1], [(sys.argv[3:], sys.argv[2])])[0])
