"""Which files are images, videos and audio, by their names."""

from __future__ import annotations

_SUFFIXES = {
    "image": "jpg jpeg png webp gif bmp tif tiff",
    "video": "mp4 mkv webm avi mov m4v mpg mpeg",
    "audio": "wav flac mp3 ogg opus m4a",
}


def _kinds_by_suffix() -> dict[str, str]:
    kinds = {}
    for kind, suffixes in _SUFFIXES.items():
        kinds.update(dict.fromkeys(suffixes.split(), kind))
    return kinds


_KIND_OF_SUFFIX = _kinds_by_suffix()


def media_kind(name: str) -> str | None:
    """The media kind of a file by its name; None for other files."""
    return _KIND_OF_SUFFIX.get(suffix_of(name))


def suffix_of(name: str) -> str:
    return name.rpartition(".")[2].lower()
