"""Tensors that loader workers send: small ones by value, large ones in shared memory, all as they were."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mvp_engine.data.loader import SMALL_BYTES, SampleLoader

LARGE = SMALL_BYTES // 4 + 1  # elements in float32


def tensors(seed):
    made = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    return {
        "float32": made,
        "bfloat16": made.bfloat16(),
        "bool": made > 0,
        "int32": (10 * made).int(),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "transposed": made.T,
        "complex": torch.complex(made, made),
        "large": torch.full((LARGE,), float(seed)),
    }


class Made(Dataset[dict[str, Tensor]]):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return tensors(index)


def test_tensors_of_workers_arrive_as_they_were_and_only_large_ones_in_shared_memory():
    loader = SampleLoader(
        Made(), micro_batch_size=1, shuffle=False, num_workers=1, collate_fn=lambda rows: rows[0]
    )
    for index, found in enumerate(loader):
        for name, wanted in tensors(index).items():
            assert found[name].dtype == wanted.dtype
            assert found[name].stride() == wanted.stride()
            assert torch.equal(found[name], wanted), name
            assert found[name].is_shared() == (name in ("transposed", "complex", "large"))
            found[name].zero_()  # its own memory
