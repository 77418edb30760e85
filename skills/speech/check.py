"""Check a plan of talker positions: in one pass it must give the log-probs of transformers' step-by-step `generate`.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit.speech.omni_model import OmniModel
from mvp_engine.kit.speech.protocol import SpeechProtocol, SpokenTurn
from mvp_engine.kit.speech.rows import SPEECH
from mvp_engine.tools.skill_check import given, run_check

IM_START, IM_END, USER, ASSISTANT, NEWLINE, PAD, BOS, EOS = range(1, 9)
FIRST_WORD, VOCABULARY = 10, 60
BOOKS, CODES = 3, 16
CODEC = {"eos_token": 20, "bos": 21, "pad": 22, "nothink": 23, "think_bos": 24, "think_eos": 25}
SPEAKERS = {"ann": 26, "bob": 27}
TOLERANCE = 1e-4


def kit_plan(protocol: SpeechProtocol, ids_T: Tensor, positions: Tensor, turns: Sequence[SpokenTurn]) -> Media:
    return protocol.plan(ids_T, positions, turns)


def settings() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 8, "num_hidden_layers": 2, "initializer_range": 0.3}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
    vision |= {"patch_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    audio = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8, "output_dim": 16}
    audio |= {"num_mel_bins": 8, "downsample_hidden_size": 4}
    tokens = {"audio_token_id": 57, "image_token_id": 58, "video_token_id": 59}
    talker = {"num_code_groups": BOOKS, "thinker_hidden_size": 16, "accept_hidden_layer": 1, **tokens}
    talker |= {f"codec_{name}_id": id for name, id in CODEC.items()}
    talker |= {"speaker_id": SPEAKERS, "spatial_merge_size": 2}
    talker["text_config"] = {**text, **experts, "vocab_size": 32, "shared_expert_intermediate_size": 8}
    talker["code_predictor_config"] = {**text, "vocab_size": CODES, "num_code_groups": BOOKS}
    vocoder = {"codebook_size": CODES, "num_quantizers": BOOKS, "hidden_size": 8, "intermediate_size": 8}
    vocoder |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "decoder_dim": 16}
    vocoder |= {"upsample_rates": [2], "upsampling_ratios": [2]}
    return {
        "model_type": "qwen3_omni_moe",
        "im_start_token_id": IM_START,
        "im_end_token_id": IM_END,
        "user_token_id": USER,
        "assistant_token_id": ASSISTANT,
        "tts_pad_token_id": PAD,
        "tts_bos_token_id": BOS,
        "tts_eos_token_id": EOS,
        "thinker_config": {
            "text_config": {**text, **experts, "vocab_size": VOCABULARY},
            "vision_config": vision,
            "audio_config": audio,
            **tokens,
        },
        "talker_config": talker,
        "code2wav_config": vocoder,
    }


def spoken_by_transformers(model: Any, prompt: Tensor, speaker: str) -> dict[str, Tensor]:
    """The text that `generate` spoke, its codes, and the log-probs of the first code of each frame."""
    kept: list[Any] = []
    generate = model.talker.generate

    def generate_and_keep(**options: Any) -> Any:
        kept.append(generate(output_logits=True, **options))
        return kept[0]

    model.talker.generate = generate_and_keep
    model.code2wav.chunked_decode = lambda codes, **_: torch.zeros(1, 1, 1)
    options = {"do_sample": False, "max_new_tokens": 9, "repetition_penalty": 1.0}
    # 1,024 ids are suppressed otherwise, more than this talker has.
    suppressed = list(range(CODES, 32))
    output, _ = model.generate(
        prompt[None],
        speaker=speaker,
        thinker_max_new_tokens=5,
        thinker_do_sample=False,
        thinker_eos_token_id=None,
        talker_suppress_tokens=suppressed,
        **{f"talker_{name}": value for name, value in options.items()},
    )
    del model.talker.generate
    result = kept[0]
    codes = torch.stack([step[-1] for step in result.hidden_states if step[-1] is not None], 1)[0]
    log_probs = torch.stack(result.logits, 1)[0].float().log_softmax(-1)
    first = log_probs[: len(codes)].gather(1, codes[:, :1])[:, 0]
    # The last token that the thinker wrote would be the end of its answer: the talker never reads it.
    return {"text": output[0, len(prompt) : -1], "codes": codes, "first": first}


def problems(plan: Any) -> list[str]:
    """The problems of a plan, one sentence each."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(0)
    config = read_config(None, settings())
    whole = Qwen3OmniMoeForConditionalGeneration(config).eval()
    for parameter in whole.parameters():  # transformers leaves the talker's experts without values
        torch.nn.init.normal_(parameter, std=0.3)
    model: Any = OmniModel.from_config(read_config(None, settings())).eval()
    model.hf.load_state_dict(whole.thinker.state_dict())
    model.talker.load_state_dict(whole.talker.state_dict())
    protocol = SpeechProtocol.for_config(config)
    first_turn = [IM_START, USER, NEWLINE, 30, 31, IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE, 40, IM_END, NEWLINE]
    question = [IM_START, USER, NEWLINE, 33, 34, 35, IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
    found = []
    for name, prompt in {"one turn": question, "two turns": first_turn + question}.items():
        ids = torch.tensor(prompt)
        spoken = spoken_by_transformers(whole, ids, "bob")
        row = torch.cat([ids, spoken["text"], torch.tensor([IM_END, NEWLINE])])
        turn = SpokenTurn(prompt.count(ASSISTANT) - 1, spoken["codes"], "bob")
        media = plan(protocol, row, torch.arange(len(row)), [turn])
        batch = PackedBatch.from_sequences([row], media={SPEECH: media})
        with torch.no_grad():
            log_probs = model(batch, ["speech_log_probs"])["speech_log_probs"]
        frames = len(spoken["codes"])
        if len(log_probs) != frames + 1:
            found.append(f"{name}: {len(log_probs)} rows predict something; {frames} frames and an end are wanted")
            continue
        difference = (log_probs[:frames, 0] - spoken["first"]).abs().max()
        if difference > TOLERANCE:
            found.append(
                f"{name}: log-probs of the first codebook differ from those of transformers' generate by up to "
                f"{difference:.3f}: the talker would be trained on inputs that it never sees when it speaks"
            )
        if log_probs[-1, 0] == 0:
            found.append(f"{name}: the end of speech is not learnt: the sounds would not end")
    return found


if __name__ == "__main__":
    run_check(lambda: problems(given(kit_plan, "the plan", "plan")))
