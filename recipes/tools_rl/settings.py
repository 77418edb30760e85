"""The config keys of `engine.py`. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.config.schema import Count
from mvp_engine.kit.rl import RLConfig


class Search(Section):
    documents: str  # a JSONL file with the columns title and text
    folder: str  # the index is built into it, once
    results: Count = 3  # documents that a search returns


class SearchConfig(RLConfig):
    search: Search
    instruction: str | None = None  # the system message of every prompt; null: that of the chat template
