"""A weight-transfer back end for vLLM servers: each update reads one safetensors file.

vLLM loads it by its entry point in every process of a server whose environment has this package
(`pip install --no-deps mvp-engine`); `--weight-transfer-config '{"backend": "mvp_file"}'` selects it. This module runs
inside the server: it may import vllm, torch and safetensors, and nothing of this package that needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BACKEND = "mvp_file"


def register() -> None:
    """The entry point `vllm.general_plugins`. vLLM calls it once in each process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # there is no public question
        WeightTransferEngineFactory.register_engine(BACKEND, file_engine())


def file_engine() -> Any:
    """The class of the back end. It is made here since its base class exists inside a server only."""
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        path: str  # a file that every worker of the server can read

    class FileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            weights = load_file(update_info.path, device=str(self.device))
            self.model.load_weights(weights.items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            # On a CPU a head multiplies by a packed copy of its weights. vLLM 0.32 packs again what was loaded by
            # name, and a head that is tied to the embedding was not: its log-probs would be off by 1 and more.
            if self.device.type == "cpu":
                for module in self.model.modules():
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            pass

    return FileEngine
