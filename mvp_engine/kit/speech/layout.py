"""Speech targets of a batch: the layout of `PackedBatch.media["speech"]`.

An item is one sequence of the talker; its rows are the talker's positions. For Qwen3-Omni that is one spoken assistant
turn: the user turns before it, a header, and one position per frame of codes. For CSM it is all turns of a row: the
text of each, and its frames. The row before a frame predicts it.
"""

from __future__ import annotations

from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch

SPEECH = "speech"  # the key in `PackedBatch.media`
# Keys in its `fields`, one number per item; on the host, as grids are.
FRAME_COUNTS = "frame_counts"
TURN_COUNTS = "turn_counts"  # spoken turns
SOURCE_COUNTS = "source_counts"  # rows that read a hidden state

# Columns of `values`, which are int64.
LABEL = 0  # the first code of the next frame, or the end of speech; IGNORE elsewhere
TEXT = 1  # the token of the text channel, in the vocabulary of the language model
SOURCE = 2  # the token of its sequence whose hidden state is read (media); -1: the text's embedding
POSITIONS = slice(
    3, 6
)  # temporal, height, width, in POSITION_UNITS: those of videos may be fractions
CODES = slice(6, None)  # ids whose embeddings are added, one per codebook; -1: none
FIRST_CODE = 6
POSITION_UNITS = 2**20


def num_positions(batch: PackedBatch) -> int:
    """What a pack holds of its budget: tokens, and the talker's positions."""
    speech = batch.media.get(SPEECH)
    return batch.num_tokens + (0 if speech is None else len(speech.values))


def num_speech_labels(batch: PackedBatch) -> Tensor:
    """The frames and ends of speech that carry loss, as a scalar on the batch's device."""
    return (_values(batch)[:, LABEL] != IGNORE).sum()


def num_speech_frames(batch: PackedBatch) -> Tensor:
    """The frames that carry loss, without ends of speech, as a scalar on the batch's device."""
    values = _values(batch)
    return ((values[:-1, LABEL] != IGNORE) & (values[1:, -1] >= 0)).sum()


def _values(batch: PackedBatch) -> Tensor:
    """The talker's positions; none without speech."""
    return batch.media[SPEECH].values if SPEECH in batch.media else batch.labels.new_empty(0, 1)
