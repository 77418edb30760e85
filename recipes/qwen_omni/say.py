"""Speak with an exported model, by transformers' own generation: python say.py FOLDER CODEC TEXT OUT.wav [SPEAKER]

CODEC is the folder of the codec, which plays the codes. With a pretrained model, its vocoder does: `generate` returns
the waveform.
"""

import sys
from typing import Any

import numpy as np


def say(folder: str, text: str, speaker: str, max_frames: int = 80) -> tuple[str, np.ndarray]:
    """The answer to a text, and its codes (frames, books), by greedy generation."""
    import torch
    from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).eval()
    found: list[Any] = []

    def keep_codes(codes: Any, **options: Any) -> Any:
        """In the place of the vocoder, which a model from random weights never trained."""
        found.append(codes)
        return torch.zeros(1, 1, 1)

    model.code2wav.chunked_decode = keep_codes
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"]
    output, _ = model.generate(
        ids,
        speaker=speaker,
        thinker_max_new_tokens=8,
        thinker_do_sample=False,
        thinker_eos_token_id=tokenizer.eos_token_id,
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
        talker_max_new_tokens=max_frames,
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer, found[0][0].T.numpy()


if __name__ == "__main__":
    import soundfile

    from mvp_engine.kit.speech import open_codec

    folder, codec_folder, text, file = sys.argv[1:5]
    answer, codes = say(folder, text, sys.argv[5] if len(sys.argv) > 5 else "ann")
    codec = open_codec(codec_folder)
    soundfile.write(file, codec.decode(codes), codec.sampling_rate)
    print(f"{answer} ({len(codes)} frames in {file})")
