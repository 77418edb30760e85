"""Ask an exported model, with nothing but transformers: python hear.py FOLDER SOUND [SOUND ...]"""

import sys

QUESTION = "Write down what is said."


def hear(folder: str, sounds: list[str], max_new_tokens: int = 16) -> list[str]:
    """What the model writes down, for each sound."""
    import soundfile
    import soxr
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()
    rate, answers = processor.feature_extractor.sampling_rate, []
    for sound in sounds:
        wave, own = soundfile.read(sound, dtype="float32", always_2d=True)
        wave = soxr.resample(wave.mean(1), own, rate)
        content = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[prompt], audio=[wave], sampling_rate=rate, return_tensors="pt")
        written = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[
            0, inputs["input_ids"].shape[1] :
        ]
        answers.append(processor.decode(written, skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    for file, text in zip(sys.argv[2:], hear(sys.argv[1], sys.argv[2:]), strict=True):
        print(f"{file}: {text}")
