"""Screenshots for the docs, by headless Chromium, from a run of the demo recipe.

    make demo
    python scripts/screenshots.py outputs/RUN [OTHER_RUN ...]     # writes docs/images/{report,live,inspect}.png

The live page shows all of the given runs; it may be taken while the demo trains. Debian's package is `chromium`.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image

from mvp_engine.cli import main as mvp
from mvp_engine.report.live import LiveServer
from mvp_engine.runs import Run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --hide-scrollbars"
FLAGS += " --disable-background-networking --disable-component-update --virtual-time-budget=4000"
LARGEST = 150_000  # bytes of an image


def screenshot(address: str, out: Path, width: int, height: int, dark: bool = False) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        words = [browser, *FLAGS.split(), f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
        words += ["--blink-settings=preferredColorScheme=0"] if dark else []
        words += [f"--screenshot={folder}/page.png", address]
        subprocess.run(words, check=True, capture_output=True, timeout=120)
        image = Image.open(f"{folder}/page.png").convert("RGB")
        for colours in (256, 128, 64, 32):
            file = io.BytesIO()
            image.quantize(colours).save(file, "png", optimize=True)
            if file.tell() <= LARGEST:
                break
    out.write_bytes(file.getvalue())
    print(f"{out.relative_to(ROOT)}: {image.width}x{image.height}, {file.tell():,} bytes")


def main(folders: list[str]) -> None:
    runs = [Run(Path(folder).resolve()) for folder in folders]
    IMAGES.mkdir(parents=True, exist_ok=True)
    with LiveServer(runs[0].dir.parent, runs, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        query = "&".join(f"run={run.id}" for run in runs)
        screenshot(f"{server.url}/?{query}", IMAGES / "live.png", 1280, 1000)
        server.shutdown()
    page = runs[0].dir / "report.html"
    if page.is_file():
        screenshot(page.as_uri(), IMAGES / "report.png", 1120, 1000, dark=True)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Path(folder) / "rows.html"
        config = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
        if mvp(["data", "inspect", str(config), "--html", str(gallery)]):
            sys.exit("mvp data inspect failed")
        screenshot(gallery.as_uri(), IMAGES / "inspect.png", 1120, 900)


if __name__ == "__main__":
    main(sys.argv[1:])
