"""Vocoder: what plays the codes of a speaking model, loaded from its folder: Qwen3-Omni's vocoder, CSM's codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.hf.config_source import read_config
from mvp_engine.hf.load import load
from mvp_engine.hf.omni_model import VOCODER
from mvp_engine.hf.speech_protocol import SpeechProtocol
from mvp_engine.hf.whole_folder import WholeFolder

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
