"""What the CPU configs learn from, made once into a folder: a corpus, a tokenizer, chats. Nothing is downloaded.

The corpus is what every Python brings along: the modules of its standard library. What their authors wrote about
classes and functions is the source `docs`, the functions themselves, without that, are `code`. Every twentieth module
is held out, so nothing of it is ever trained on. The chats are small tasks whose answers can be checked.
"""

import ast
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.tiny_processors import train_tokenizer

from .chats import SYSTEM, TASKS, make_chats

VOCABULARY = 1024
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Words with the blank before them, digits one by one, signs, white space: as the tokenizers of the family cut texts.
PIECES = r"[^\S\n]?\p{L}+|\p{N}|[^\S\n]?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def make(folder: Path, modules: int, chats: int) -> None:
    """Fill a folder from so many modules, with so many chats of each task."""
    corpus: dict[str, dict[str, list[str]]] = {split: {"docs": [], "code": []} for split in ("train", "eval")}
    for i, file in enumerate(_modules(modules)):
        split = corpus["eval" if i % 20 == 19 else "train"]
        tree = ast.parse(source := file.read_text(encoding="utf-8"))
        split["docs"] += _docs(tree, file.stem)
        split["code"] += _code(tree, source.splitlines())
    for split, kinds in corpus.items():
        for kind, texts in kinds.items():
            _write(folder / f"{split}_{kind}.jsonl", [{"text": text} for text in texts])
    train = [text for texts in corpus["train"].values() for text in texts]
    for name, rows in make_chats(chats).items():
        _write(folder / f"{name}.jsonl", rows)
    words = [f"system user assistant {style} {' '.join(task('1'))}" for style in SYSTEM for task in TASKS.values()]
    make_tokenizer(train + 10 * words).save_pretrained(folder / "tokenizer")


def _modules(count: int) -> list[Path]:
    """The first modules of the standard library by name that say something; packages are left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [file for file in sorted(folder.glob("*.py")) if not file.stem.startswith(("_", "this", "antigravity"))]
    if len(found) < count:
        raise UserError(f"{folder} has the sources of {len(found)} modules: set made.modules to fewer than that")
    return found[:count]


def _docs(tree: ast.Module, module: str) -> list[str]:
    """A document for the module and for each of its classes and functions: signatures, and what is said of them."""
    about = ast.get_docstring(tree)
    every = ["\n\n".join(_told(node, module)) for node in tree.body if isinstance(node, DEFINITIONS)]
    return [text for text in [f"{module}\n{about}" if about else "", *every] if text]


def _told(node: Any, above: str) -> Iterator[str]:
    name = f"{above}.{node.name}"
    if about := ast.get_docstring(node):
        yield f"{name}{'' if isinstance(node, ast.ClassDef) else f'({ast.unparse(node.args)})'}\n{about}"
    for child in node.body:
        if isinstance(child, DEFINITIONS):
            yield from _told(child, name)


def _code(tree: ast.Module, lines: list[str]) -> list[str]:
    """A document for each function and method, without its docstring."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                head = lines[node.lineno - 1 : node.body[0].lineno - 1]
                found.append(textwrap.dedent("\n".join([*head, *lines[body[0].lineno - 1 : node.end_lineno]])))
    return found


def make_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE with the special tokens and the chats of the family, digits one by one."""
    tokenizer = train_tokenizer(texts, VOCABULARY, split_pattern=PIECES)
    tokenizer.eos_token = "<|endoftext|>"  # behind a document; behind an answer the template writes <|im_end|>
    return tokenizer


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
