"""Facts of a LeRobot folder for `mvp data inspect`: what it holds, and the statistics of states and actions."""

from __future__ import annotations

from mvp_engine.kit.actions.rows import FrameRows
from mvp_engine.kit.actions.stats import column_stats

MAX_TASKS = 5
MAX_VALUES = 16


def robot_facts(rows: FrameRows) -> dict[str, str]:
    """A few lines by name."""
    folder = rows.folder
    good = rows.frames.good
    tasks = list(dict.fromkeys(folder.tasks.values()))
    shown = ", ".join(repr(task) for task in tasks[:MAX_TASKS])
    cameras = []
    for camera, (height, width) in zip(rows.cameras, rows.image_sizes, strict=True):
        kind = "video" if folder.is_video(camera) else "images"
        cameras.append(f"{camera} {width}x{height} {kind}")
    facts = {
        "robot": f"LeRobot {folder.version}: {len(folder.episodes):,} episodes at {folder.fps:g} frames per second",
        "tasks": f"{len(tasks):,}: {shown}{', ...' if len(tasks) > MAX_TASKS else ''}",
        "cameras": ", ".join(cameras) or "none",
    }
    for key, values in ((rows.settings.state, rows.states), (rows.settings.action, rows.actions)):
        if not good.any():
            continue
        stats = column_stats(values[good])
        names = folder.names_of(key) or [str(number) for number in range(values.shape[1])]
        words = []
        for number, name in enumerate(names[:MAX_VALUES]):
            words.append(f"{name} {stats.mean[number]:.3g} ± {stats.std[number]:.3g}")
        more = ", ..." if values.shape[1] > MAX_VALUES else ""
        facts[key.rpartition(".")[2]] = f"{values.shape[1]} values: {', '.join(words)}{more}"
    return facts
