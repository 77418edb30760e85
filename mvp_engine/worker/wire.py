"""Messages between processes: pickles with the data of tensors next to them, which are copied once on each side.

torch's own pickling of tensors copies whole storages twice, or moves the sender's tensors into shared memory, where a
change on one side is seen on the other.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

Message = tuple[bytes, list[Any]]  # a pickle, and the data of its tensors


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_tensor(value)


def reduce_tensor(value: Any) -> Any:
    """What `reducer_override` of a pickler returns for a tensor: its data as a buffer next to the pickle."""
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return NotImplemented
    data = value.detach().cpu().contiguous()
    raw: Any = data.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), data.dtype, tuple(data.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def dumps(value: Any, pickler: Any = _Pickler) -> Message:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return out.getvalue(), buffers


def loads(message: Message) -> Any:
    body, buffers = message
    return pickle.loads(body, buffers=buffers)


def send(connection: Connection, message: Message) -> None:
    body, buffers = message
    raws = [memoryview(buffer) for buffer in buffers]
    connection.send_bytes(pickle.dumps([raw.nbytes for raw in raws]))
    connection.send_bytes(body)
    for raw in raws:
        if raw.nbytes:
            connection.send_bytes(raw)


def receive(connection: Connection) -> Message:
    sizes = pickle.loads(connection.recv_bytes())
    body = connection.recv_bytes()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        if buffer:
            connection.recv_bytes_into(buffer)
    return body, buffers
