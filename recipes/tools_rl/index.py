"""A search index over documents in one file, by SQLite's full text search (FTS5) with BM25 ranks."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

FILE = "index.sqlite"
MAX_TEXT = 1500  # characters of a document that a search returns


class Index:
    """The index in a folder, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.database = sqlite3.connect(f"file:{(folder / FILE).absolute()}?mode=ro", uri=True)

    def search(self, query: str, number: int) -> str:
        """The best documents for any of the words of a query, each with its title."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))  # no operators of the query language
        if not words:
            return "error: the query has no words"
        order = (
            "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents, 4, 1), rowid LIMIT ?"
        )
        found = self.database.execute(order, (words, number)).fetchall()
        texts = [f"{title}\n{text[:MAX_TEXT]}" for title, text in found]
        return "\n\n".join(texts) or "nothing found"


def build(folder: Path, documents: Path) -> None:
    """Write the index of a JSONL file with the columns title and text."""
    with closing(sqlite3.connect(folder / FILE)) as database, database:
        database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        database.executemany("INSERT INTO documents VALUES (?, ?)", read(documents))


def read(documents: Path) -> Iterator[tuple[str, str]]:
    with open(documents, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield row["title"], row["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{documents}:{number}: wanted a JSON object with title and text: {error!r}") from None
