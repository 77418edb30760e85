"""Encoders of images, video and audio without host syncs, and their features in place of placeholder tokens."""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "encoders": "apply_sync_free_audio apply_sync_free_vision",
    "media_features": (
        "apply_sync_free_features copy_to_device register_host_ids register_video_tokens"
    ),
    "shared_media": "apply_shared_features encoder_inputs largest_share",
}
