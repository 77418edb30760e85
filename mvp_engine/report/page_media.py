"""Media on the report page: images that a click enlarges, and audio, inside the HTML file."""

from __future__ import annotations

import base64
import io

from PIL import Image

# Image formats by the first bytes of a file.
_IMAGE_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
SMALL_IMAGE = 120  # pixels: smaller ones are enlarged without smoothing


def media_item(data: bytes) -> str:
    """The HTML of a PNG, JPEG, GIF, WebP or WAV file."""
    text = base64.b64encode(data).decode()
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'
    for first_bytes, kind in _IMAGE_KINDS.items():
        if data.startswith(first_bytes):
            small = " class=small" if _is_small(data) else ""
            image = f'<img alt=""{small} src="data:image/{kind};base64,{text}">'
            # Without a script: the state of the checkbox enlarges the image.
            return f'<label class=zoom><input type=checkbox aria-label="enlarge">{image}</label>'
    return "[?]"


def _is_small(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return max(image.size) < SMALL_IMAGE
    except OSError:  # not readable here; the browser shows what it can
        return False
