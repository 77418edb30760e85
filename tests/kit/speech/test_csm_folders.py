"""Folders and rows of CSM: exports, LoRA and merges, generated sounds, dialogues from the data kit."""

from __future__ import annotations

import json
from typing import Any

import torch
from conftest import mvp, user_error
from folders import alone, entries
from omni_models import speech_step
from run_files import printed_json
from test_csm import BOOKS, batch_of, config, csm, rows, whole
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.data.encode.processor import load_processor
from mvp_engine.kit.generation import check_writes
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.speech import Player, speak
from mvp_engine.kit.speech.omni_model import OmniModelEngine, trains_text
from mvp_engine.kit.speech.rows import CODES, SPEECH, TEXT, num_speech_labels
from mvp_engine.kit.speech.settings import SpeechGeneration, SpeechMLLMData
from mvp_engine.model_engine import ModelSource, Settings


def trained(folder, lora=None):
    """An engine of the folder after two updates; one of the micro-batches has no speech."""
    whole().save_pretrained(folder)
    model = MLLMModelKit(lora).build(ModelSource(str(folder)), "omni_model")
    engine = OmniModelEngine(model, alone(), Settings(seed=7))
    engine.initialize(
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    assert not trains_text(engine.model)
    for _ in range(2):
        engine.train_batch(rows(), speech_step(engine.model))
    return engine


def check_folder(before, after):
    """What changed in a folder that transformers loads; not the codec."""
    from transformers import CsmForConditionalGeneration

    old, new = (dict(entries(folder / "model.safetensors")) for folder in (before, after))
    assert old.keys() == new.keys()
    _, info = CsmForConditionalGeneration.from_pretrained(after, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    changed = {name for name, value in old.items() if not torch.equal(value, new[name])}
    assert not any(name.startswith("codec_model.") for name in changed)
    return changed


def test_export_of_a_trained_csm_keeps_the_codec(tmp_path):
    trained(tmp_path / "in").export_hf(tmp_path / "out")
    names = [name for name, _ in entries(tmp_path / "in" / "model.safetensors")]
    assert check_folder(tmp_path / "in", tmp_path / "out") == {
        n for n in names if not n.startswith("codec_model.")
    }


def test_merge_of_a_csm_with_lora_is_its_export(tmp_path):
    engine = trained(tmp_path / "in", Lora(rank=2, target_modules=["talker"]))
    (adapted,) = [row["adapters"] for row in trained_parts(engine.model) if row["part"] == "talker"]
    engine.save_checkpoint(tmp_path / "step_00000002")
    engine.export_hf(tmp_path / "out")
    assert mvp(f"export {tmp_path}/step_00000002 {tmp_path}/merged") == 0
    assert not check_folder(tmp_path / "out", tmp_path / "merged")
    # Attention and MLP of 2 layers each, and the projection of the backbone's states.
    assert len(check_folder(tmp_path / "in", tmp_path / "merged")) == adapted == 2 * 2 * (4 + 3) + 1


def test_speak_with_csm_plays_codes_with_the_codec_of_its_folder(tmp_path):
    whole().save_pretrained(tmp_path / "csm")
    player = Player.of_folder(tmp_path / "csm")
    codes = torch.randint(0, 32, (5, BOOKS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = whole().codec_model.decode(codes.T[None]).audio_values.flatten()
    torch.testing.assert_close(torch.from_numpy(player.play(codes)), wanted, rtol=0, atol=1e-6)
    assert (player.books, player.codebook_size, player.sampling_rate) == (BOOKS, 32, 24_000)
    model = csm()
    with torch.no_grad():
        model.hf.lm_head.weight[32:] = 0  # an untrained model may speak ids that its codec lacks
        model.hf.depth_decoder.codebooks_head.weight[:, :, 32:] = 0
    ids = torch.tensor([57, 5, 6, 7, 8])
    (sound,) = speak(
        model, [batch_of(ids, None)], player, settings=SpeechGeneration(max_frames=3, temperature=0)
    )
    assert len(sound.codes) in (0, 3)
    assert sound.seconds > 0 or not len(sound.codes)
    with user_error("the model spoke code 33, and its codec has 0 to 31"):
        player.play(codes + 33 - int(codes.max()))
    with user_error(r"eval\.generation: csm writes no text"):
        check_writes(model, "eval.generation")


def test_data_kit_makes_rows_of_csm_from_codes(tmp_path):
    codes = [[1, 2, 3, 4], [5, 6, 7, 8]]
    earlier = [{"type": "text", "text": "[0]hi"}, {"type": "audio", "codes": codes[:1]}]
    content = [{"type": "text", "text": "[0]hi"}, {"type": "audio", "codes": codes}]
    spoken = {"role": "assistant", "content": content}
    row = {"messages": [{"role": "assistant", "content": earlier, "loss": False}, spoken]}
    asked = {"messages": [{"role": "user", "content": "[0]hi"}, spoken]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(asked)}\n")
    letters = {letter: index for index, letter in enumerate("[]0hi>?")} | {"<": 57}
    bare = Tokenizer(WordLevel(letters, unk_token="?"))
    bare.pre_tokenizer = Split("", "isolated")
    processor = PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<", eos_token=">", unk_token="?"
    )
    processor.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    sources = {"train": {"path": str(tmp_path / "rows.jsonl")}}
    options = {
        "cache": str(tmp_path / "cache"),
        "speech": {"codec": None, "books": BOOKS},
        "max_bad_rows": 1.0,
    }
    data = SpeechMLLMData(sources=sources, pack_tokens=64, **options)
    kit = MLLMDataKit(data, processor, model_config=config(), num_workers=0)
    # Its sound would be learnt as that of the user's text.
    assert [(bad.where[-1], bad.reason) for bad in kit.bad_rows("train")] == [("2", "speech_role")]
    (batch,) = list(kit.loader("train", shuffle=False, global_batch_size=1))
    values = batch.media[SPEECH].values
    ids = batch.input_ids.tolist()
    assert values[:, TEXT].tolist() == [*ids[:7], -1, -1, *ids[7:], -1, -1, -1]
    end = [0] * BOOKS
    assert values[7:9, CODES].tolist() == [codes[0], end]
    assert values[-3:, CODES].tolist() == [*codes, end]
    assert num_speech_labels(batch) == 3  # the first turn is read, and not learnt
    assert float(csm()(batch, ["speech_loss"])["speech_loss"].detach().sum()) > 0


def test_processor_of_csm_is_refused_with_the_fix(tmp_path):
    from transformers import CsmProcessor, EncodecFeatureExtractor

    letters = {"<": 0, ">": 1, "?": 2, "A": 3, "E": 4}
    bare = Tokenizer(WordLevel(letters, unk_token="?"))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<", eos_token=">", unk_token="?"
    )
    tokenizer.audio_token, tokenizer.audio_eos_token = "A", "E"
    tokenizer.audio_token_id, tokenizer.audio_eos_token_id = 3, 4
    CsmProcessor(EncodecFeatureExtractor(), tokenizer).save_pretrained(tmp_path)
    with user_error("has a CsmProcessor, which is not supported: set processor to a folder"):
        load_processor(tmp_path)


def test_commands_know_a_folder_of_csm(tmp_path, capsys):
    whole().save_pretrained(tmp_path / "csm")
    assert mvp(f"plan {tmp_path}/csm --gpu H200 --json") == 0
    facts = printed_json(capsys)
    assert facts["fits"]
    assert facts["tokens_per_step"] > 0
    for speech in ([], ["--speak", "a.wav"]):
        assert mvp(f"chat {tmp_path}/csm -p hi", *speech) == EXIT_USER_ERROR
        assert "csm writes no text, so mvp chat has no answer" in capsys.readouterr().err
