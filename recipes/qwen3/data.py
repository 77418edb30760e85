"""The data of the CPU configs, built once into a folder: a corpus, a tokenizer, chats. Nothing is downloaded.

The corpus is the standard library of the running Python. Its docstrings are the source `docs`, its functions without
docstrings the source `code`. Every twentieth module is held out, so nothing of it is ever trained on.
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

from .chats import SYSTEM_PROMPTS, TASKS, make_chats

VOCABULARY = 1024
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SKIPPED_MODULES = ("_", "this", "antigravity")
# Pre-tokenization as in Qwen's tokenizers: words with the space before them, single digits, punctuation, white space.
SPLIT_PATTERN = r"[^\S\n]?\p{L}+|\p{N}|[^\S\n]?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build(folder: Path, modules: int, chats: int) -> None:
    """Fill a folder from this number of modules, with this number of chats for each task."""
    corpus: dict[str, dict[str, list[str]]] = {split: {"docs": [], "code": []} for split in ("train", "eval")}
    for i, file in enumerate(_modules(modules)):
        split = corpus["eval" if i % 20 == 19 else "train"]
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        split["docs"] += _docs(tree, file.stem)
        split["code"] += _code(tree, source.splitlines())
    for name, kinds in corpus.items():
        for kind, texts in kinds.items():
            _write(folder / f"{name}_{kind}.jsonl", [{"text": text} for text in texts])
    for name, rows in make_chats(chats).items():
        _write(folder / f"{name}.jsonl", rows)
    texts = corpus["train"]["docs"] + corpus["train"]["code"]
    make_tokenizer(texts + 10 * _chat_texts()).save_pretrained(folder / "tokenizer")


def _modules(count: int) -> list[Path]:
    """The first modules of the standard library by name, without packages and private modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [file for file in sorted(folder.glob("*.py")) if not file.stem.startswith(SKIPPED_MODULES)]
    if len(found) < count:
        raise UserError(f"{folder} has the sources of {len(found)} modules: set made.modules to fewer than that")
    return found[:count]


def _docs(tree: ast.Module, module: str) -> list[str]:
    """A document for the module and for each of its classes and functions: signatures and docstrings."""
    docstring = ast.get_docstring(tree)
    documents = [f"{module}\n{docstring}"] if docstring else []
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            documents.append("\n\n".join(_docstrings(node, module)))
    return [text for text in documents if text]


def _docstrings(node: Any, parent: str) -> Iterator[str]:
    """The qualified name, signature and docstring of a definition and of those inside of it."""
    name = f"{parent}.{node.name}"
    docstring = ast.get_docstring(node)
    if docstring:
        signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
        yield f"{name}{signature}\n{docstring}"
    for child in node.body:
        if isinstance(child, DEFINITIONS):
            yield from _docstrings(child, name)


def _code(tree: ast.Module, lines: list[str]) -> list[str]:
    """A document for each function and method, without its docstring."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body:
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            code = [*head, *lines[body[0].lineno - 1 : node.end_lineno]]
            found.append(textwrap.dedent("\n".join(code)))
    return found


def _chat_texts() -> list[str]:
    """The words of the chats, for the tokenizer's training."""
    texts = []
    for system in SYSTEM_PROMPTS:
        for task in TASKS.values():
            texts.append(f"system user assistant {system} {' '.join(task('1'))}")
    return texts


def make_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE with Qwen's special tokens and chat format, and one token per digit."""
    tokenizer = train_tokenizer(texts, VOCABULARY, split_pattern=SPLIT_PATTERN)
    tokenizer.eos_token = "<|endoftext|>"  # ends a document; the chat template ends an answer with <|im_end|>
    return tokenizer


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
