"""Speech by generation: frames of codes, one after the other with a KV cache, and the waveform of them.

    player = Player.of_folder("Qwen/Qwen3-Omni-30B-A3B-Instruct")  # or Player.of_codec(open_codec(FOLDER))
    (sound,) = speak(model, [prompt], player)
    sound.save(Path("answer.wav"))

Legend: B prompts, L positions of the longest prompt, K codebooks, D hidden size, F frames, V codes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.export import WholeFolder
from mvp_engine.hf.weights.load import load
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.generation import Answer, Completions
from mvp_engine.kit.speech.codec import Codec
from mvp_engine.kit.speech.csm import CsmModel, CsmPasses
from mvp_engine.kit.speech.omni_model import VOCODER, OmniModel
from mvp_engine.kit.speech.protocol import SpeechError, SpeechProtocol, SpokenTurn
from mvp_engine.kit.speech.rows import FIRST_CODE, FRAME_COUNTS, SPEECH, TEXT, SpeechRows
from mvp_engine.kit.speech.settings import SpeechGeneration
from mvp_engine.report.page import wav_file


class SpeakingPasses(Protocol):
    """What a family of talkers computes for a frame."""

    @property
    def decoder(self) -> Any:
        """Reads text and frames, and predicts first codes."""

    @property
    def predictor(self) -> Any:
        """Reads the decoder's hidden state and the codes of a frame, and predicts the others."""

    @property
    def first_head(self) -> Tensor: ...

    def rest_heads(self) -> Tensor: ...

    def embedding(self, codes_B: Tensor, book: int) -> Tensor: ...


class Start(NamedTuple):
    """What the decoder reads first, for each prompt."""

    inputs: list[Tensor]  # (L, D)
    positions: list[Tensor]  # (L,) or (3, L)


class Frames(NamedTuple):
    """How a family goes from frame to frame."""

    next_inputs: Callable[[Tensor, int], Tensor]  # codes (B, K) and the number of a frame -> (B, D)
    are_ends: Callable[[Tensor], Tensor]  # codes (B, K) -> (B,) bool
    suppressed: list[int]  # first codes that are never drawn


def decode_frames(
    passes: SpeakingPasses, start: Start, frames: Frames, max_frames: int, draw: Draw
) -> list[Spoken]:
    """The codes of all prompts, up to the frame that ends each. Prompts are padded on the left."""
    from transformers import DynamicCache

    longest = max(map(len, start.inputs))
    missing = [longest - len(one) for one in start.inputs]
    pairs = list(zip(start.inputs, missing, strict=True))
    inputs_BLD = torch.stack([F.pad(one, (0, 0, count, 0)) for one, count in pairs])
    mask_BL = torch.stack([F.pad(torch.ones_like(one[:, 0]), (count, 0)) for one, count in pairs])
    mask_BL = mask_BL.long()
    padded = [F.pad(one, (longest - one.shape[-1], 0)) for one in start.positions]
    positions = torch.stack(padded, dim=-2)  # (B, L) or (3, B, L)
    cache = DynamicCache(config=passes.decoder.config)
    heads_KVD = passes.rest_heads()
    codes: list[Tensor] = []  # (B, K) each
    ended_B = mask_BL.new_zeros(len(mask_BL), dtype=torch.bool)
    lengths_B = mask_BL.new_full((len(mask_BL),), max_frames)
    for frame in range(max_frames + 1):  # the last one says whether speech ends there
        out = passes.decoder(
            inputs_embeds=inputs_BLD,
            attention_mask=mask_BL,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        hidden_BD = out.last_hidden_state[:, -1]
        seen_BF = torch.stack([one[:, 0] for one in codes], 1) if codes else None
        logits_BV = (hidden_BD @ passes.first_head.T).float()
        first_B = draw.first(logits_BV, seen_BF, frames.suppressed)
        codes.append(_frame(passes, heads_KVD, hidden_BD, first_B, draw))
        ends_B = frames.are_ends(codes[-1]) & ~ended_B
        lengths_B = torch.where(ends_B, frame, lengths_B)
        ended_B |= ends_B
        if bool(ended_B.all()):
            break
        inputs_BLD = frames.next_inputs(codes[-1], frame)[:, None].to(inputs_BLD.dtype)
        mask_BL = F.pad(mask_BL, (0, 1), value=1)
        positions = positions[..., -1:] + 1
    found = torch.stack(codes, 1).cpu()
    results = zip(found, lengths_B.tolist(), ended_B.tolist(), strict=True)
    return [Spoken(one[:length], ended) for one, length, ended in results]


def _frame(
    passes: SpeakingPasses, heads_KVD: Tensor, hidden_BD: Tensor, first_B: Tensor, draw: Draw
) -> Tensor:
    """(B, K): the first code, and those that the predictor adds, one after the other."""
    from transformers import DynamicCache

    cache = DynamicCache(config=passes.predictor.config)
    codes = [first_B]
    inputs_BLD = torch.stack([hidden_BD, passes.embedding(first_B, 0).to(hidden_BD.dtype)], 1)
    for book, head_VD in enumerate(heads_KVD, 1):
        out = passes.predictor(inputs_embeds=inputs_BLD, past_key_values=cache, use_cache=True)
        codes.append(draw.rest((out.last_hidden_state[:, -1] @ head_VD.T).float()))
        inputs_BLD = passes.embedding(codes[-1], book)[:, None].to(hidden_BD.dtype)
    return torch.stack(codes, 1)


# How codes of speech are drawn from logits, and what generation returns.
#
# Legend: B prompts, K codebooks, F frames, V codes.


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn; the defaults are those of transformers' `generate` for Qwen3-Omni."""

    do_sample: bool = True  # False: the most likely codes
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05  # of the first codebook
    residual_top_k: int = 50
    residual_top_p: float = 0.8


class Spoken(NamedTuple):
    """The codes of one answer, (F, K), and whether the talker ended it by itself."""

    codes: Tensor
    ended: bool


class Draw:
    """Draws codes from logits, through transformers' logits processors in their order."""

    def __init__(self, sampling: Sampling, generator: torch.Generator | None) -> None:
        self.sampling = sampling
        self.generator = generator

    def first(self, logits_BV: Tensor, seen_BF: Tensor | None, suppressed: list[int]) -> Tensor:
        from transformers import RepetitionPenaltyLogitsProcessor

        sampling = self.sampling
        if seen_BF is not None and sampling.repetition_penalty != 1.0:
            penalty: Any = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits_BV = penalty(seen_BF, logits_BV)
        logits_BV[:, suppressed] = float("-inf")
        return self._draw(logits_BV, sampling.temperature, sampling.top_k, sampling.top_p)

    def rest(self, logits_BV: Tensor) -> Tensor:
        return self._draw(
            logits_BV, 1.0, self.sampling.residual_top_k, self.sampling.residual_top_p
        )

    def _draw(self, logits_BV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        if not self.sampling.do_sample:
            return logits_BV.argmax(-1)
        scores: Any = logits_BV / temperature
        unused: Any = None
        if top_k:
            scores = TopKLogitsWarper(top_k)(unused, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(unused, scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]


# Speech by generation: codes from an OmniModel, which the vocoder below plays.
#
# Legend: B prompts, R rows of speech, K codebooks, D hidden size, T tokens.
#
# The first inputs of the talker are those of a training row: `SpeechProtocol.plan` and `omni_model.py` make both.


@torch.no_grad()
def generate_codes(
    model: OmniModel | CsmModel,
    prompts: Sequence[PackedBatch],
    speakers: Sequence[str | None] | None = None,
    *,
    max_frames: int = 512,
    generator: torch.Generator | None = None,
    **sampling: Any,
) -> list[Spoken]:
    """Speak the last answer of each prompt: a batch of one sequence that ends with the text of an assistant's turn.

    `sampling` are the fields of `Sampling`. The model must be whole on this rank, not sharded. CSM has no list of
    speakers, and reads the sounds of earlier turns from the speech of a prompt.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise UserError(
            "speech is generated by a model on one rank: export the sharded one, and speak with the folder"
        )
    if not prompts:
        return []
    voices: list[str | None] = [None] * len(prompts) if speakers is None else list(speakers)
    draw = Draw(Sampling(**sampling), generator)
    was_training = model.training
    model.eval()
    try:
        if isinstance(model, CsmModel):
            return csm_codes(model, list(prompts), voices, max_frames, draw)
        return _talker_codes(model, list(prompts), voices, max_frames, draw)
    finally:
        model.train(was_training)


def _talker_codes(
    model: OmniModel,
    prompts: list[PackedBatch],
    speakers: list[str | None],
    max_frames: int,
    draw: Draw,
) -> list[Spoken]:
    assert model.whole is not None
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None
    device = model.talker.codec_head.weight.device
    planned = [_with_plan(protocol, *pair) for pair in zip(prompts, speakers, strict=True)]
    num_frames = [int(one.media[SPEECH].fields[FRAME_COUNTS][0]) for one in planned]
    batch = PackedBatch.concat(planned).to(device)
    rows = SpeechRows.of(batch)
    assert rows is not None
    passes = model.passes()
    with model.media_hidden(batch) as hidden_TD:
        inputs_RD = passes.inputs(rows, passes.embeddings(rows.codes), hidden_TD)
    texts_RD = passes.text(rows.values[:, TEXT])
    pad_D = passes.text(torch.tensor([protocol.tts[2]], device=device))[0]
    start = Start([], [])
    texts: list[
        Tensor
    ] = []  # (frames, D) of each prompt: tokens, the end of text; then pads follow
    first = 0
    for length, count in zip(rows.lengths, num_frames, strict=True):
        end = first + length - count
        start.inputs.append(inputs_RD[first:end])
        start.positions.append(rows.positions[:, first:end])
        texts.append(texts_RD[end : first + length])
        first += length

    def next_inputs(codes_BK: Tensor, frame: int) -> Tensor:
        text_BD = torch.stack([text[frame] if frame < len(text) else pad_D for text in texts])
        return passes.embeddings(codes_BK).sum(1) + text_BD

    frames = Frames(
        next_inputs,
        lambda codes_BK: codes_BK[:, 0] == protocol.codec_eos,
        _special_codes(model.talker.config),
    )
    with attention.eager_attention(model.talker.config):
        return decode_frames(passes, start, frames, max_frames, draw)


def _special_codes(config: Any) -> list[int]:
    """Ids of the talker that are neither codes nor the end of speech."""
    ids = range(config.code_predictor_config.vocab_size, config.text_config.vocab_size)
    return [id for id in ids if id != config.codec_eos_token_id]


def _with_plan(protocol: SpeechProtocol, prompt: PackedBatch, speaker: str | None) -> PackedBatch:
    """The prompt with speech of zeros in its last answer: one frame for each token, so that all text is in the rows."""
    ids_T = prompt.input_ids.cpu()
    turns = protocol.num_answers(ids_T)
    frames = protocol.num_text_tokens(ids_T, turns - 1) + 1
    codes = torch.zeros(frames, protocol.books, dtype=torch.long)
    try:
        speech = protocol.plan(
            ids_T, prompt.position_ids.cpu(), [SpokenTurn(turns - 1, codes, speaker)]
        )
    except SpeechError as error:
        raise UserError(f"this answer cannot be spoken: {error.detail}") from None
    with_speech = copy.copy(prompt)
    with_speech.media = {**prompt.media, SPEECH: speech}
    return with_speech


# Speech of CSM by generation: the codes of transformers' `generate`.
#
# Legend: B prompts, L positions of a prompt, K codebooks, D hidden size, T tokens, R rows of speech.


def csm_codes(
    model: CsmModel,
    prompts: list[PackedBatch],
    speakers: list[str | None],
    max_frames: int,
    draw: Draw,
) -> list[Spoken]:
    """The codes of the last turn of each prompt. Sounds of earlier turns are in its speech."""
    named = next((name for name in speakers if name is not None), None)
    if named is not None:
        raise UserError(f"CSM has no list of speakers: write {named!r} into the text, as [0]")
    csm: Any = model.hf
    config: Any = csm.config
    passes = CsmPasses(csm)
    device = csm.lm_head.weight.device
    inputs = [_inputs(passes, prompt, device) for prompt in prompts]
    start = Start(inputs, [torch.arange(len(one), device=device) for one in inputs])

    def are_ends(codes_BK: Tensor) -> Tensor:
        # transformers does not look at the last codebook either.
        return (codes_BK[:, :-1] == config.codebook_eos_token_id).all(1)

    frames = Frames(lambda codes_BK, frame: passes.frame_inputs(codes_BK), are_ends, [])
    with attention.eager_attention(config), attention.eager_attention(csm.depth_decoder.config):
        return decode_frames(passes, start, frames, max_frames, draw)


def _inputs(passes: CsmPasses, prompt: PackedBatch, device: torch.device) -> Tensor:
    """(L, D): the rows of a prompt up to the end of its text; frames after that are what is to be spoken."""
    csm = passes.csm
    speech = prompt.media.get(SPEECH)
    ids_T = prompt.input_ids.to(device)
    if speech is None or not len(speech.row_counts):
        return csm.embed_text_tokens(ids_T)
    rows_RC = speech.values.cpu()
    is_text_R = rows_RC[:, -1] < 0
    num_read = int(is_text_R.sum())
    if num_read == len(ids_T):  # otherwise the rows end with the last spoken turn, and text follows
        end = int(is_text_R.nonzero()[-1]) + 1
        rows_RC, is_text_R = rows_RC[:end], is_text_R[:end]
    rows_RC = rows_RC.to(device)
    text_RD = csm.embed_text_tokens(rows_RC[:, TEXT].clamp(min=0))
    frames_RD = passes.frame_inputs(rows_RC[:, FIRST_CODE:].clamp(min=0))
    read_RD = torch.where(is_text_R[:, None].to(device), text_RD, frames_RD.to(text_RD.dtype))
    return torch.cat([read_RD, csm.embed_text_tokens(ids_T[num_read:])])


# Vocoder: what plays the codes of a speaking model, loaded from its folder: Qwen3-Omni's vocoder, CSM's codec.

CSM_CODEC = "codec_model"


class Vocoder:
    """Codes in, a waveform out."""

    def __init__(self, module: Any, protocol: SpeechProtocol) -> None:
        assert protocol.sampling_rate is not None
        self.module = module
        self.sampling_rate = protocol.sampling_rate
        self.books = int(module.config.num_quantizers)
        self.codebook_size = int(module.config.codebook_size)

    @torch.no_grad()
    def __call__(self, codes_FK: Tensor) -> Tensor:
        """(samples,) float32 between -1 and 1."""
        if not len(codes_FK):
            return torch.zeros(0)
        highest = int(codes_FK.max())
        if highest >= self.codebook_size:  # CSM has places for other ids, such as padding
            raise UserError(
                f"the model spoke code {highest}, and its codec has 0 to {self.codebook_size - 1}: train it longer"
            )
        codes_1KF = codes_FK.T[None].to(next(self.module.parameters()).device)
        if hasattr(self.module, "chunked_decode"):
            waveform = self.module.chunked_decode(codes_1KF)
        else:
            waveform = self.module.decode(codes_1KF).audio_values
        return waveform.float().flatten().cpu()


def load_vocoder(folder: str | Path, device: torch.device | str = "cpu") -> Vocoder:
    """The vocoder of a folder that speaks, in float32."""
    from transformers import AutoModel
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    config = read_config(folder, {})
    protocol = SpeechProtocol.for_config(config)
    if protocol is None or protocol.sampling_rate is None:
        raise UserError(f"{folder} has no vocoder: it is not a folder of Qwen3-Omni or CSM")
    is_csm = protocol.name == "csm"
    vocoder_config = config.codec_config if is_csm else config.code2wav_config
    vocoder_config.dtype = torch.float32
    vocoder_config._attn_implementation = "eager"
    make: Any = AutoModel.from_config if is_csm else Qwen3OmniMoeCode2Wav._from_config
    module = make(vocoder_config).eval()
    prefix = CSM_CODEC if is_csm else VOCODER
    params = {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
    loaded, _ = load(WholeFolder(config, {}).skeleton(), Path(folder), params)
    if missing := sorted(params.keys() - loaded):
        raise UserError(
            f"{folder} lacks {len(missing)} tensors of its vocoder, such as {missing[0]}"
        )
    return Vocoder(module.to(device), protocol)


# Sounds: codes by generation, and a waveform by the model's vocoder or by a codec.

TOGETHER = 64  # prompts that are spoken in one batch


@dataclass(frozen=True)
class Sound:
    """Generated speech."""

    codes: Tensor  # (frames, books)
    waveform: np.ndarray  # float32
    sampling_rate: int
    ended: bool  # by the model itself, not by the limit of frames
    speaker: str | None = None  # None: the model's first one

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sampling_rate

    def save(self, file: Path) -> None:
        """Write a WAV file of 16 bits."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as temporary:
            temporary.write_bytes(wav_file(self.waveform, self.sampling_rate))


@dataclass(frozen=True)
class Player:
    """Codes (frames, books) to a waveform."""

    play: Callable[[Tensor], np.ndarray]
    sampling_rate: int
    books: int
    codebook_size: int
    name: str = "the codec"

    @classmethod
    def of_codec(cls, codec: Codec) -> Player:
        def play(codes: Tensor) -> np.ndarray:
            return codec.decode(codes.cpu().numpy())

        return cls(play, codec.sampling_rate, codec.books, codec.codebook_size)

    @classmethod
    def of_folder(cls, folder: str | Path) -> Player:
        """The vocoder of an Omni folder, or the codec of a CSM folder."""
        vocoder: Any = load_vocoder(folder)

        def play(codes: Tensor) -> np.ndarray:
            with torch.inference_mode():
                return vocoder(codes).float().cpu().numpy()

        return cls(play, vocoder.sampling_rate, vocoder.books, vocoder.codebook_size, "the vocoder")

    def check(self, protocol: SpeechProtocol) -> None:
        """Raise if a talker speaks codes that cannot be played."""
        if self.books < protocol.books or self.codebook_size < protocol.codec_size:
            raise UserError(
                f"{self.name} has {self.books} codebooks of {self.codebook_size} entries, and the talker speaks "
                f"{protocol.books} of {protocol.codec_size}: play with the codec of the model's training "
                "(data.speech.codec, mvp chat --codec)"
            )


def speak(
    model: Any,
    prompts: Sequence[PackedBatch],
    player: Player,
    speakers: Sequence[str | None] | None = None,
    settings: SpeechGeneration | None = None,
) -> list[Sound]:
    """The sound of each prompt: one sequence that ends with the text of the assistant's turn, and its media.

    `model` is an OmniModel or a CsmModel that is not sharded. CSM also reads the sounds of earlier turns of a prompt.
    """
    settings = settings or SpeechGeneration()
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None, "a model that speaks"
    player.check(protocol)
    names = list(speakers or [None] * len(prompts))
    found: list[Spoken] = []
    for first in range(0, len(prompts), TOGETHER):
        some = list(prompts[first : first + TOGETHER])
        if not protocol.reads_answers:
            some = [prompt.without_targets() for prompt in some]
        found += generate_codes(
            model,
            some,
            names[first : first + TOGETHER],
            max_frames=settings.max_frames,
            do_sample=settings.temperature > 0,
            temperature=settings.temperature or 1.0,
            repetition_penalty=1.05 if settings.temperature else 1.0,
        )
    sounds = []
    for spoken, name in zip(found, names, strict=True):
        waveform = np.zeros(0, np.float32)
        if len(spoken.codes):
            waveform = np.asarray(player.play(spoken.codes), np.float32)
        sounds.append(Sound(spoken.codes.cpu(), waveform, player.sampling_rate, spoken.ended, name))
    return sounds


def speak_completions(
    model: Any, completions: Completions, player: Player, settings: SpeechGeneration
) -> list[Sound]:
    """The sounds of the completions of rows, each by the speaker of the row's own last sound, if it has one.

    A completion without text has an empty sound that did not end.
    """
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None, "a model that speaks"
    speakers = [_speaker(prompt.batch, protocol) for prompt, _ in completions]
    nothing = torch.zeros(0, protocol.books, dtype=torch.long)
    silence = Sound(nothing, np.zeros(0, np.float32), player.sampling_rate, ended=False)
    sounds = [replace(silence, speaker=speaker) for speaker in speakers]
    texts = [spoken_tokens(tokens, protocol) for _, tokens in completions]
    with_text = [index for index, text in enumerate(texts) if text]
    prompts = [with_completion(completions[i][0].batch, None, texts[i]) for i in with_text]
    found = speak(model, prompts, player, [speakers[i] for i in with_text], settings)
    for index, sound in zip(with_text, found, strict=True):
        sounds[index] = sound
    return sounds


def spoken_tokens(tokens: Sequence[int], protocol: SpeechProtocol) -> list[int]:
    """The text of a completion: its tokens up to the first that ends or starts a turn."""
    turns = {protocol.im_start, protocol.im_end}
    return list(takewhile(lambda token: token not in turns, tokens))


def _speaker(prompt: PackedBatch, protocol: SpeechProtocol) -> str | None:
    speech = prompt.media.get(SPEECH)
    if speech is None or not len(speech.row_counts):
        return None
    rows = int(speech.row_counts[-1])
    return protocol.speaker_of(speech.values[-rows:], int(speech.fields[FRAME_COUNTS][-1]))


@dataclass(frozen=True)
class SpokenAnswer(Answer):
    """An answer of an evaluation that the model may have spoken."""

    speech: str = ""  # the file of the spoken answer
    speaker: str | None = None
    speech_ended: bool | None = None  # whether the model itself ended it

    def media_files(self) -> list[bytes]:
        file = Path(self.speech)
        return [file.read_bytes()] if self.speech and file.is_file() else []


def save_answers(
    answers: Sequence[SpokenAnswer], sounds: Sequence[Sound], folder: Path
) -> list[SpokenAnswer]:
    """Write the sound of each answer as a WAV file into `folder`, and return the answers with these files."""
    spoken = []
    for answer, sound in zip(answers, sounds, strict=True):
        file = folder / f"{answer.source}_{answer.sample}.wav"
        sound.save(file)
        answer = replace(answer, speech=str(file), speaker=sound.speaker)
        spoken.append(replace(answer, speech_ended=sound.ended))
    return spoken
