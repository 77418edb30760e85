"""Single frames of videos by time, for random access: a seek to the key frame, then a few frames are decoded.

Each process keeps some containers open. A frame that shortly follows the one before it is decoded without a seek, so
reading in order costs no more than decoding the file.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.kit.data.read.decode_video import open_container
from mvp_engine.kit.data.read.media_source import decoder_errors
from mvp_engine.kit.data.read.row_types import BadRow

MAX_OPEN = 32  # containers of one process; the oldest is closed
# Frames after the last decoded one that are decoded without a seek: LeRobot writes a key frame every 2 frames.
NEAR_FRAMES = 3


class OpenVideo:
    """An open container, and the last frame that was decoded from it."""

    def __init__(self, file: Path) -> None:
        self.container = open_container(file)
        self.stream = self.container.streams.video[0]
        # Decoder threads read ahead of the frame, which random access throws away.
        self.stream.codec_context.thread_count = 1
        self.start = float((self.stream.start_time or 0) * self.stream.time_base)
        self.decoded: Any = None
        self.time = -1.0
        self._frames: Any = iter(())

    def frame_at(self, seconds: float, fps: float) -> np.ndarray:
        """The pixels (H, W, 3) of the frame that is shown at this time; it is at most half a frame away."""
        half = 0.5 / fps
        if self.decoded is None or not 0 <= seconds - self.time + half < (NEAR_FRAMES + 0.5) / fps:
            self._seek(seconds + half)
        while self.time < seconds - half:
            frame = next(self._frames, None)
            if frame is None:
                end = max(self.time, 0.0)
                raise BadRow(
                    "missing_frame", f"the video ends at {end:.3f} s, before {seconds:.3f} s"
                )
            self.decoded = frame
            self.time = frame.time - self.start
        if self.time > seconds + half:
            text = f"the frame nearest to {seconds:.3f} s is at {self.time:.3f} s"
            self.decoded = None
            raise BadRow("missing_frame", text)
        return np.asarray(self.decoded.to_ndarray(format="rgb24"))

    def _seek(self, seconds: float) -> None:
        target = int((seconds + self.start) / self.stream.time_base)
        self.container.seek(target, stream=self.stream)
        self._frames = self.container.decode(self.stream)
        self.decoded = None
        self.time = -1.0

    def close(self) -> None:
        self.container.close()


class VideoFrames:
    """Frames of many files. A pickled copy has no open containers: each process opens its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, OpenVideo] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        VideoFrames.__init__(self)

    def frame(self, file: Path, seconds: float, fps: float) -> np.ndarray:
        """The frame of `file` at a time; BadRow if the file is missing, broken or too short."""
        if not file.is_file():
            raise BadRow("missing_file", f"there is no {file}")
        try:
            with decoder_errors(f"video {file.name}"):
                return self._opened(file).frame_at(seconds, fps)
        except BadRow:
            self._forget(file)
            raise

    def _opened(self, file: Path) -> OpenVideo:
        if self._process != os.getpid():  # forked: the parent's file offsets are not ours to move
            VideoFrames.__init__(self)
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[file] = OpenVideo(file)
        return self._open[file]

    def _forget(self, file: Path) -> None:
        video = self._open.pop(file, None)
        if video is not None:
            video.close()


def image_from_cell(cell: Any, root: Path) -> np.ndarray:
    """The pixels of an image in a parquet cell: {"bytes", "path"}, as `datasets` writes it."""
    if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
        raise BadRow("wrong_type", f"an image is {{bytes, path}}, not {type(cell).__name__}")
    source: Any = cell.get("bytes")
    if source is None:
        path = (root / cell["path"]).resolve()
        if not path.is_relative_to(root.resolve()):
            raise BadRow("path_escape", f"{cell['path']} leads out of {root}")
        source = path
    with decoder_errors("image"):
        opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        return np.array(opened.convert("RGB"))
