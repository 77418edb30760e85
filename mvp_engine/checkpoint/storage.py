"""Reading and writing one checkpoint folder with PyTorch's distributed checkpoint (DCP).

The folder holds tensors under flat names. What is no tensor travels as bytes inside a uint8 tensor, so that a
checkpoint has one format and one moment of completion. DCP itself unpickles its index without restriction; here the
index may only name DCP's own records, and bytes are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mvp_engine.errors import UserError

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_ALLOWED = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_record = module in _ALLOWED_MODULES and "." not in name and isinstance(_attribute(module, name), type)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_record or is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"checkpoint index names {module}.{name}, which no checkpoint of ours holds")


def _attribute(module: str, name: str) -> Any:
    return getattr(__import__(module, fromlist=[name]), name, None)


class SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{self.path}/.metadata is not a checkpoint index")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's part; returns when all ranks have written theirs. A failure on one rank raises on all."""
    writer = FileSystemWriter(folder, overwrite=True)
    save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors that a checkpoint holds, by name, without reading them."""
    known = SafeReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)}


def read(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place."""
    load(tensors, storage_reader=SafeReader(folder), process_group=group, no_dist=group is None)


def to_bytes(value: Any) -> Tensor:
    """Refuses what could not be read again, before it is written."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        from_bytes(data)
    except pickle.UnpicklingError as error:
        why = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error))
        raise UserError(
            f"a checkpoint holds tensors, numbers, strings, lists and dicts; something in the state is neither: {why}. "
            "Look at extra_state() and at the loader's and scheduler's state_dict()."
        ) from None
    return data


def from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
