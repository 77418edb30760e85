"""`mvp data inspect` of a file without a model: what is known from its rows alone. It imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvp_engine import plugins
from mvp_engine.kit.actions.robot_facts import robot_facts
from mvp_engine.kit.actions.rows import FrameRows, is_lerobot
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_source import open_media
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Codes
from mvp_engine.kit.data.read.rows import null_bits, null_rows, read_row
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.settings import DataSource, resolve_source
from mvp_engine.tools.inspect_rows import bad_reason, find_row, plain_row
from mvp_engine.tools.inspect_stats import count_bad, length_stats, sample_rows


def inspect_file(path: str, *, limit: int = 3, row: str | None = None) -> dict[str, Any]:
    """What is known without a model: formats, counts, bad rows, missing media files, and the messages of some rows."""
    settings = resolve_source(DataSource(path=path))
    robot: dict[str, Any] = {}
    if is_lerobot(settings.path):
        rows = FrameRows(str(settings.path), settings.label, ActionData(), chunk=1)
        source = Source([rows], rows.folder.root)
        robot = {"robot": robot_facts(rows)}
    else:
        source = open_source(settings.path, settings.root, Limits.text_characters)
    # Whether media of answers may be targets depends on the config, which is not known here.
    row_format = RowFormat(
        columns=settings.columns,
        targets=tuple(plugins.names("target")),
        downloaded=settings.is_downloaded,
    )
    name = settings.label
    wanted = range(limit) if row is None else [find_row([source], row)[1]]
    lengths = list[int]()
    bad = list[dict[str, Any]]()
    shown = list[dict[str, Any]]()
    bits = np.zeros(len(source), np.uint8)
    for index in range(len(source)):
        where = source.where(index)
        facts: dict[str, Any] = {"format": None, "bad": None, "sequences": []}
        try:
            read = read_row(source[index], row_format)
            targets = [message.target for message in read.messages if message.target]
            targets = [target for target in targets if not isinstance(target.value, Codes)]
            for part in [*read.media(), *targets]:
                open_media(part.value, Limits(), source.root, part.kind)
            messages = sum(len(message.text) for message in read.messages)
            lengths.append(messages + len(read.text or ""))
            bits[index] = null_bits(read) + bool(read.media())
            if index in wanted:
                facts["format"] = read.format
                facts["sequences"] = plain_row(read)
        except BadRow as error:
            facts["bad"] = bad_reason(error)
            bad.append({"source": name, "where": where, **facts["bad"]})
        if index in wanted:
            shown.append({"row": index, "source": name, "where": where, **facts})
    for index, (reason, detail) in null_rows(source, bits).items():
        found = {"reason": reason, "detail": detail}
        bad.append({"source": name, "where": source.where(index), **found})
        for facts in shown:
            facts["bad"] = found if facts["row"] == index else facts["bad"]
    counts = {
        "name": name,
        "rows": len(source),
        "good": len(source) - len(bad),
        "bad": len(bad),
        "overlong": 0,
        "tokens": None,
        "share": None,
    }
    return {
        "split": None,
        "decoded": False,
        "missing": "tokens, loss masks, media sizes and packing need the model's processor: give --model MODEL",
        "sources": [counts],
        "sample": sample_rows([source], [row_format]),
        "lengths": length_stats(np.array(lengths, np.int64), "characters"),
        "plan": None,
        "overlong": None,
        "bad": count_bad(bad),
        "rows": shown,
        **robot,
    }
