"""A tiny Qwen3-Omni config with a word tokenizer, and rows with sounds of sines, for tests of speech targets."""

import json

import numpy as np
import soundfile

from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.speech.codec import ResidualKMeans
from mvp_engine.kit.speech.settings import SpeechMLLMData
from mvp_engine.kit.tiny_processors import word_tokenizer

RATE = 8000
WORDS = ["one", "two", "three", "four", "say"]
TTS = ("<tts_pad>", "<tts_bos>", "<tts_eos>")
BOOKS = 2
SIZE = 16


def tokenizer():
    return word_tokenizer(WORDS, TTS)


def omni_config(**talker):
    """The config of a Qwen3-Omni with 2 codebooks of 16 entries at 25 frames per second."""
    ids = dict(tokenizer().get_vocab().items())
    values = {
        "model_type": "qwen3_omni_moe",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "system_token_id": ids["system"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_bos>"],
        "tts_eos_token_id": ids["<tts_eos>"],
        "talker_config": {
            "num_code_groups": BOOKS,
            "codec_eos_token_id": 17,
            "codec_bos_id": 18,
            "codec_pad_id": 19,
            "codec_nothink_id": 20,
            "codec_think_bos_id": 21,
            "codec_think_eos_id": 22,
            "speaker_id": {"Anna": 23, "Bert": 24},
            "code_predictor_config": {"vocab_size": SIZE, "num_code_groups": BOOKS},
            **talker,
        },
        "code2wav_config": {"upsampling_ratios": [2]},
        "thinker_config": {  # small: the data kit builds it on the meta device
            "audio_config": {"encoder_layers": 1, "num_hidden_layers": 1},
            "vision_config": {"depth": 1, "deepstack_visual_indexes": [0]},
            "text_config": {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1},
        },
    }
    return read_config(None, values)


def sine(seconds, pitch, rate=RATE):
    times = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (pitch + 60 * times) * times)).astype(np.float32)


def write_sound(file, seconds=0.4, pitch=300.0, rate=RATE):
    soundfile.write(file, sine(seconds, pitch, rate), rate)
    return file.name


def write_codec(folder):
    waveforms = [sine(0.5, 200 + 20 * i) for i in range(20)]
    ResidualKMeans.fit(waveforms, RATE, mels=20, books=BOOKS, size=SIZE, iterations=3).save(folder)
    return str(folder)


def spoken_row(text, **audio):
    content = [{"type": "text", "text": text}, {"type": "audio", **audio}]
    return {
        "messages": [
            {"role": "user", "content": f"say {text}"},
            {"role": "assistant", "content": content},
        ]
    }


def text_row(text):
    return {
        "messages": [
            {"role": "user", "content": f"say {text}"},
            {"role": "assistant", "content": text},
        ]
    }


def speech_kit(folder, rows, **speech):
    """A kit for rows in `folder`, which has the codec in `codec`."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (folder / "codec").exists():
        write_codec(folder / "codec")
    settings = SpeechMLLMData.model_validate(
        {
            "sources": [{"path": str(file)}],
            "pack_tokens": 200,
            "global_batch_tokens": 200,
            "max_bad_rows": 1.0,
            "cache": str(folder / "cache"),
            "speech": {"codec": str(folder / "codec"), "books": BOOKS, **speech},
        }
    )
    return MLLMDataKit(settings, tokenizer(), model_config=omni_config())
