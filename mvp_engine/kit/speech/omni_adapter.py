"""OmniAdapter: an Omni model as model engines see it; what its talker does not support is refused by name."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.model.preflight import (
    BOUNDS,
    NEIGHBOUR_BOUNDS,
    TRIALS,
    _difference,
    _eager_eval,
    _max_difference,
    _special_tokens,
)
from mvp_engine.kit.speech.protocol import SpeechProtocol, SpokenTurn
from mvp_engine.kit.speech.rows import SPEECH


class OmniAdapter(HFAdapter):
    def preflight(self, layout: Layout, exact: bool) -> None:
        if isinstance(self.model, LanguageModel):  # CSM has no text to compare
            super().preflight(layout, exact)
        group = layout.world.host_group
        with raise_on_all_ranks(group):
            check_speech(self.model, exact=exact, group=group)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> NoReturn:
        raise _unsupported("parallel.tensor > 1", "parallel.tensor=1 and parallel.shard")

    def apply_expert_parallel(self, mesh: DeviceMesh) -> list[nn.Module]:
        raise _unsupported("parallel.expert > 1", "parallel.expert=1 and parallel.shard")

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> NoReturn:
        raise _unsupported("parallel.pipeline > 1", "parallel.pipeline=1 and parallel.shard")

    def balance_experts(self, settings: Experts, device: torch.device) -> NoReturn:
        raise _unsupported("experts.balance or experts.z", "experts.balance=none and experts.z=0")


def _unsupported(key: str, fix: str) -> UserError:
    return UserError(
        f"model.type=omni_model does not support {key}: thinker and talker run on different tokens. Set {fix}"
    )


# Preflight of speech: a few random spoken turns before training; a talker that fails is rejected by name.
#
# Three questions, each on the model as it is placed on its layout, so all ranks must call `check_speech`:
#
# - packs: do two spoken turns in one pack give what each gives alone, whatever its neighbour says?
# - causality: does the distribution of a code depend on that code, or on later ones?
# - protocol: does the talker read what transformers' `generate` feeds it step by step?

QUESTION = 3  # words of the user, after a line break
ANSWER = 4  # words that are spoken, after a line break
FRAMES = (7, 5)  # of the two turns: longer than the text, so that its end and pads are read
CHANGED = 3  # the frame whose codes after the first are replaced
LEAKS = "two spoken turns in one pack change each other by {:.1e}"
PACKS = "two spoken turns in one pack differ from the same two alone by {:.1e}"
LATER = "distributions depend on codes that are spoken later, or on the code itself, by {:.1e}"
DEAF = "the codes of a frame do not change what is spoken after it"
PROTOCOL = "it does not read what transformers' generate feeds it: inputs differ by {:.1e}"


@torch.no_grad()
def check_speech(model: PackedModel, *, exact: bool, group: dist.ProcessGroup | None) -> None:
    """Raise unless the talker answers all three questions right, in one trial of three.

    `exact`: the model computes in float32. `group`: all ranks.
    """
    assert model.whole is not None
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None
    rejected = f"the talker of {protocol.name} cannot be trained"
    reason = ""
    try:
        with _eager_eval(model), warnings.catch_warnings():
            # The probe runs once, uncompiled on purpose.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            for seed in range(TRIALS):  # rounding may switch an expert in one of them
                reason = _Trial(model, protocol, seed).failure(exact, group)
                if not reason:
                    return
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{rejected}: its code fails on packed turns ({type(error).__name__}: {error})"
        ) from error
    raise UserError(f"{rejected}: {reason}")


class _Trial:
    """Two random spoken turns, each in a batch of its own."""

    def __init__(self, model: PackedModel, protocol: SpeechProtocol, seed: int) -> None:
        self.model = model
        self.protocol = protocol
        self.family: _Family = (_Csm if protocol.name == "csm" else _Qwen3)(model, protocol)
        self.device = next(model.parameters()).device
        self.dice = torch.Generator().manual_seed(seed)
        self.ids = [self.family.chat(self._words(QUESTION + ANSWER + 3)) for _ in range(2)]

    def failure(self, exact: bool, group: dist.ProcessGroup | None) -> str:
        """What is wrong, on any rank; empty if nothing is."""
        first = self._turn(0, self._codes(FRAMES[0]))
        second, other = (self._turn(1, self._codes(FRAMES[1])) for _ in range(2))
        codes_FK = first.codes.clone()
        codes_FK[CHANGED, 1:] = 1 + codes_FK[CHANGED, 1:] % (self.protocol.codec_size - 1)
        changed = self._turn(0, codes_FK)
        packed, difference = self._outputs(second, first)
        beside_other = self._outputs(other, first)[0]
        of_first, of_second = self._outputs(first)[0], self._outputs(second)[0]
        of_changed = self._outputs(changed)[0]
        length = len(of_first)
        values = [
            _max_difference(beside_other[-length:], packed[-length:]),
            _difference(packed, torch.cat([of_second, of_first])),
            _max_difference(_before(of_changed), _before(of_first)),
            float(torch.equal(_after(of_changed), _after(of_first))),
            difference,
        ]
        found = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=torch.inf)
        if group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        near = NEIGHBOUR_BOUNDS[exact]
        bounds = {
            LEAKS: near,
            PACKS: BOUNDS[exact],
            LATER: near,
            DEAF: 0.5,
            PROTOCOL: BOUNDS[exact],
        }
        for value, (text, bound) in zip(found.tolist(), bounds.items(), strict=True):
            if value == float("inf"):
                return "its outputs are not finite: check its weights for NaN and infinity"
            if value > bound:
                return text.format(value)
        return ""

    def _words(self, count: int) -> list[int]:
        """Random tokens without those that configs name, such as starts of turns."""
        assert self.model.whole is not None
        special = _special_tokens(self.model.whole.config)
        config: Any = self.model.hf.config.get_text_config()  # type: ignore[operator, union-attr]
        # The vocab_size of CSM is that of codes.
        vocab_size = getattr(config, "text_vocab_size", config.vocab_size)
        words = torch.tensor([token for token in range(vocab_size) if token not in special])
        return words[torch.randint(len(words), (count,), generator=self.dice)].tolist()

    def _codes(self, frames: int) -> Tensor:
        size = (frames, self.protocol.books)
        return torch.randint(1, self.protocol.codec_size, size, generator=self.dice)

    def _turn(self, index: int, codes_FK: Tensor) -> _Turn:
        ids = self.ids[index]
        last = self.protocol.num_answers(ids) - 1
        media = self.protocol.plan(ids, torch.arange(len(ids)), [SpokenTurn(last, codes_FK)])
        batch = PackedBatch.from_sequences([ids], media={SPEECH: media}).to(self.device)
        return _Turn(batch, codes_FK)

    def _outputs(self, *turns: _Turn) -> tuple[Tensor, float]:
        """Log-probs and entropies, (P, 2, K), and how much the inputs of the talker differ from transformers'."""
        batch = PackedBatch.concat([turn.batch for turn in turns])
        difference = 0.0

        def compare(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            # Inside of the forward, where the weights of a sharded model are whole.
            nonlocal difference
            inputs = [
                self.family.inputs(turn.batch.input_ids, turn.codes.to(self.device))
                for turn in turns
            ]
            shard = kwargs.get("ulysses_shard")
            inputs_RD = torch.cat(inputs)
            own_RD = inputs_RD if shard is None else shard.cut(inputs_RD)
            difference = _difference(kwargs["inputs_embeds"][0], own_RD)

        handle = self.family.decoder.register_forward_pre_hook(compare, with_kwargs=True)
        try:
            found = self.model(batch, ["speech_log_probs", "speech_entropy"])
        finally:
            handle.remove()
        return torch.stack([found["speech_log_probs"], found["speech_entropy"]], 1), difference


class _Turn(NamedTuple):
    batch: PackedBatch
    codes: Tensor  # (F, K)


def _before(outputs_P2K: Tensor) -> Tensor:
    """The entropies of distributions that know nothing of the changed codes: also that of the first of these."""
    entropy_PK = outputs_P2K[:, 1]
    return torch.cat([entropy_PK[:CHANGED].flatten(), entropy_PK[CHANGED, :2]])


def _after(outputs_P2K: Tensor) -> Tensor:
    return outputs_P2K[CHANGED + 1 :, 1]


class _Family(Protocol):
    """What transformers feeds a talker."""

    decoder: nn.Module

    def chat(self, words: list[int]) -> Tensor:
        """The tokens of a question and an answer."""
        ...

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        """(R, D), by transformers' own layers and functions."""
        ...


class _Qwen3:
    def __init__(self, model: Any, protocol: SpeechProtocol) -> None:
        self.model = model
        self.protocol = protocol
        self.decoder: nn.Module = model.talker.model

    def chat(self, words: list[int]) -> Tensor:
        start, end = self.protocol.im_start, self.protocol.im_end
        user = [start, self.protocol.user, *words[: QUESTION + 1], end, words[-1]]
        return torch.tensor([*user, start, self.protocol.assistant, *words[-ANSWER - 1 :], end])

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        """As `generate`: the thinker's last token, which ends the turn, is never read."""
        from transformers import Qwen3OmniMoeForConditionalGeneration as Whole

        talker = self.model.talker
        embed = self.model.hf.get_input_embeddings()
        make: Any = Whole._get_talker_assistant_parts
        tokens = torch.tensor(self.protocol.tts, device=ids_T.device)
        bos, eos, pad = talker.text_projection(embed(tokens))[:, None, None]
        start = QUESTION + 5
        embeds_1TD = embed(ids_T[:-1])[None]
        whole = SimpleNamespace(config=self.model.whole.config, talker=talker)
        speaker = next(iter(self.protocol.speakers.values()))
        length = embeds_1TD.shape[1]
        header, _, text = make(whole, start, length, speaker, embeds_1TD, pad, bos, eos)
        tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
        frames = [table(codes_FK[:, book]) for book, table in enumerate(tables)]
        count = len(codes_FK)
        channel_FD = torch.cat([text[0], pad[0].expand(count, -1).to(text.dtype)])[:count]
        users_UD = talker.text_projection(embed(ids_T[:start]))
        return torch.cat([users_UD, header[0], torch.stack(frames).sum(0) + channel_FD])


class _Csm:
    def __init__(self, model: Any, protocol: SpeechProtocol) -> None:
        self.csm = model.hf
        self.protocol = protocol
        self.decoder: nn.Module = self.csm.backbone_model

    def chat(self, words: list[int]) -> Tensor:
        return torch.tensor(words)

    def inputs(self, ids_T: Tensor, codes_FK: Tensor) -> Tensor:
        end = torch.full_like(codes_FK[:1], self.protocol.codec_eos)
        frames = self.csm.backbone_model.embed_tokens(torch.cat([codes_FK, end])[None])
        return torch.cat([self.csm.embed_text_tokens(ids_T), frames[0]])
