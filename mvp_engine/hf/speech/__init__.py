"""Models that speak: Qwen3-Omni's thinker and talker, CSM, and the rows of text and codes that they read."""
