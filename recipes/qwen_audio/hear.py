"""Transcribe audio with an exported model, with nothing but transformers: python hear.py FOLDER AUDIO [AUDIO ...]"""

import sys

QUESTION = "Write down what is said."


def hear(folder: str, files: list[str], max_new_tokens: int = 16) -> list[str]:
    """The transcript of each audio file."""
    import soundfile
    import soxr
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()
    rate = processor.feature_extractor.sampling_rate
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    answers = []
    for file in files:
        samples, file_rate = soundfile.read(file, dtype="float32", always_2d=True)
        samples = soxr.resample(samples.mean(1), file_rate, rate)
        inputs = processor(text=[prompt], audio=[samples], sampling_rate=rate, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        completion = output[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(completion, skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    for file, text in zip(sys.argv[2:], hear(sys.argv[1], sys.argv[2:]), strict=True):
        print(f"{file}: {text}")
