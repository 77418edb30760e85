"""Speech by generation: the codes of transformers' `generate`, batched, and waveforms of the folder's vocoder."""

import torch
from conftest import user_error
from omni_models import BOOKS, CODES, IM_END, batch_of, omni_folder, spoken_row
from test_talker import FRAMES, ROWS, config, generated, omni, whole

from mvp_engine.kit.speech import Player, speak
from mvp_engine.kit.speech.generate import generate_codes, load_vocoder


def test_generate_codes_of_a_batch_are_those_of_transformers_one_by_one():
    prompts, wanted = [], []
    for settings in ROWS.values():
        row = spoken_row(**settings, spoken=(), prompt_only=True)
        text, codes, _ = generated(row)
        ids = torch.cat([row["ids"], text[:-1], torch.tensor([IM_END])])
        prompts.append(batch_of(config(), {**row, "ids": ids}))
        wanted.append(codes)
    found = generate_codes(
        omni(),
        prompts,
        ["chelsie"] * len(prompts),
        max_frames=FRAMES,
        do_sample=False,
        repetition_penalty=1.0,
    )
    for spoken, codes in zip(found, wanted, strict=True):
        length = len(spoken.codes)
        assert spoken.ended or length == FRAMES  # `generated` suppresses the end of speech
        assert torch.equal(spoken.codes, codes[:length])
    assert max(len(spoken.codes) for spoken in found) == FRAMES


def test_generate_codes_samples_from_the_generator_and_names_unknown_speakers():
    prompt = batch_of(config(), spoken_row(seed=1, spoken=()))
    one, two = (
        generate_codes(omni(), [prompt], max_frames=4, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert torch.equal(one[0].codes, two[0].codes)
    assert one[0].codes.shape[1] == BOOKS
    with user_error("no speaker 'nobody'; it has ethan, chelsie"):
        generate_codes(omni(), [prompt], ["nobody"])


def test_speak_refuses_a_codec_that_lacks_codes_of_the_talker():
    prompt = batch_of(config(), spoken_row(seed=1, spoken=()))
    for books, size in ((BOOKS, CODES - 1), (BOOKS - 1, CODES)):
        player = Player(lambda codes: codes.numpy(), 24_000, books, size)
        wanted = f"the codec has {books} codebooks of {size} entries, and the talker speaks {BOOKS} of {CODES}"
        with user_error(wanted):
            speak(omni(), [prompt], player)


def test_load_vocoder_gives_the_waveform_of_the_whole_model(tmp_path):
    theirs = omni_folder("qwen3_omni_moe", tmp_path / "in")
    vocoder = load_vocoder(tmp_path / "in")
    codes = torch.randint(0, 32, (7, BOOKS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs.code2wav.chunked_decode(codes.T[None]).flatten()
    assert len(wanted) > 7
    torch.testing.assert_close(vocoder(codes), wanted, rtol=0, atol=1e-6)
    assert whole().config.code2wav_config.num_quantizers == BOOKS
    assert vocoder.sampling_rate == 24_000
    assert len(vocoder(codes[:0])) == 0
