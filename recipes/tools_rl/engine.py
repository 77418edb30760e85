"""Reinforcement learning with a search engine: the policy answers questions from documents that it looks up."""

from functools import cached_property
from pathlib import Path
from typing import Any

from mvp_engine.kit import build_once
from mvp_engine.kit.rl import Answer, RLEngine

from .answers import is_right, with_instruction
from .index import Index, build
from .settings import SearchConfig


class SearchEngine(RLEngine):
    config_class = SearchConfig
    config: SearchConfig
    reward_columns = ("answer",)

    def search(self, query: str) -> str:
        """Search the documents. Returns the best ones.

        Args:
            query: words to look for
        """
        return self.index.search(query, self.config.search.results)

    tools = (search,)  # declared in the prompts; an answer without a call is the last one

    def reward(self, row: dict[str, Any], answer: Answer) -> dict[str, float]:
        """1 for the right answer, however many searches led to it."""
        return {"right": float(is_right(answer.text, row["answer"]))}

    @cached_property
    def index(self) -> Index:
        """Opened by each process of an episode for itself."""
        return Index(Path(self.config.search.folder))

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        """Builds the index, once."""
        file = Path(config.search.documents).expanduser()
        facts = {"documents": str(file), "bytes": file.stat().st_size, "version": 1}
        build_once(config.search.folder, facts, lambda folder: build(folder, file), "search.folder")
        return super().data_kit(config)

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        return with_instruction(super().make_processor(config), config.instruction)
