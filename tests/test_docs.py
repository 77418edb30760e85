"""The docs are true: their code runs, their links resolve, their config keys and hooks exist."""

import re
import shlex
import tomllib

import pytest
import yaml
from conftest import MAGIC, ROOT, run_process

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.config.compose import all_keys
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import flat_keys, list_runs
from mvp_engine.tools.config import recipe_schemas, schemas_of

PAGES = [
    p
    for p in ROOT.rglob("*.md")
    if not {".venv", ".venvs", "build", "outputs", ".pytest_cache"} & set(p.relative_to(ROOT).parts)
]


def blocks(page, language):
    """(the line before it, its code) of each fenced block."""
    pattern = rf"([^\n]*)\n\n```{language}\n(.*?)```"
    return re.findall(pattern, page.read_text(), flags=re.DOTALL)


def commands(text):
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_docs_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_install_page_lists_every_extra_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    page = (ROOT / "docs" / "install.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    assert [name for name in extras if f"`{name}`" not in rows and name != "dev"] == []


@pytest.mark.slow
def test_first_recipe_copied_to_files_trains_on_one_and_two_ranks(workspace, capsys):
    page = ROOT / "docs" / "recipe_list.md"
    files = 0
    for before, code in blocks(page, "python") + blocks(page, "yaml"):
        name = re.search(r"`(plane/[^`]+)`:", before)
        assert name, before
        (workspace / name[1]).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name[1]).write_text(code)
        files += 1
    assert files == 2
    [text] = [code for _, code in blocks(page, "bash") if "plane" in code]
    one_rank, two_ranks, typo = commands(text)
    assert main(one_rank[1:]) == 0
    first = list(list_runs(workspace / "outputs")[0].records())
    assert first[-1]["loss"] < 1e-3
    code, output = run_process(
        "-m", "mvp_engine.cli", *two_ranks[1:], "train.max_steps=4", cwd=workspace
    )
    assert code == 0, output
    last = list(list_runs(workspace / "outputs")[1].records())
    assert last[0]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5)
    capsys.readouterr()
    assert main(typo[1:]) == EXIT_USER_ERROR
    assert "unknown key 'optim.lrr'. Did you mean 'optim.lr'?" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_of_the_commands_page_exit_with_0(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The four commands that fine-tune a model: test_hub_commands.py.
    page = ROOT / "docs" / "commands.md"
    [text] = [code for _, code in blocks(page, "bash") if "magic_transformer" in code]
    seen = set()
    for words in commands(text):
        seen.add(words[1])
        if words[1] in ("train", "evaluate"):
            if "--nproc" in words:
                continue  # run by the test above and by the tests on two ranks
            words += f"train.max_steps=2 eval.batches=1 output_dir={tmp_path} log.backends=[jsonl]".split()
        if words[1] == "evaluate":
            words += ["--dir", str(tmp_path)]
        if words[1] == "check":
            words.append(f"output_dir={tmp_path}")
        if words[1] == "runs":
            words += ["--dir", str(tmp_path)]
        assert main(words[1:]) == 0, words
    assert seen == {"train", "evaluate", "check", "config", "runs"}


def test_recipe_table_lists_every_recipe():
    text = (ROOT / "docs" / "recipe_list.md").read_text()
    for folder in sorted((ROOT / "recipes").glob("*/configs")):
        name = folder.parent.name
        assert f"| [{name}](../recipes/{name}) |" in text, name


def test_page_for_users_of_other_trainers_says_what_the_config_does_with_their_names():
    file = ROOT / "mvp_engine" / "config" / "other_trainers.yaml"
    names = yaml.safe_load(file.read_text())
    page = (ROOT / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (accepted|answered) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    for name, ours, what in rows:
        if what == "accepted":
            keys = names["same"][name]
            keys = keys if isinstance(keys, list) else [keys]
            assert ours == " or ".join(f"`{key}`" for key in keys), name
        else:
            assert ours == names["hints"][name], name


def test_readme_fits_on_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_readme_has_the_words_that_people_search_for():
    text = (ROOT / "README.md").read_text().lower()
    for word in (
        "pip install",
        "fine-tune",
        "sft",
        "lora",
        "learning rate",
        "gradient accumulation",
        "hub",
        "fsdp",
    ):
        assert word in text, word


@pytest.mark.slow
@pytest.mark.usefixtures("own_registry")
def test_docs_python_blocks_run():
    for page in PAGES:
        if page.name in ("recipe_list.md", "python.md"):
            continue  # the first test of this file, and test_python_api.py
        for _, code in blocks(page, "python"):
            # No name of a file: pydantic would read the attribute docstrings of a config class from it.
            exec(compile(code, f"<{page.name}>", "exec"), {"__name__": "example"})


def test_docs_config_keys_exist():
    known = set(flat_keys(compose(MAGIC).config.model_dump()))
    schemas = [*schemas_of(), *recipe_schemas().values()]
    known |= {key for schema in schemas for key in all_keys(schema)}
    sections = {key.split(".")[0] for key in known} - {"flow"}  # also the name of a module
    for page in PAGES:
        for word in re.findall(r"`([a-z_]+\.[a-z_]+)(?:=[^`]*)?`", page.read_text()):
            if word.split(".")[0] in sections and not word.endswith(
                (".py", ".md", ".yaml", ".json", ".jsonl", ".txt", ".png")
            ):
                assert word in known, f"{page.name}: {word}"


def test_docs_recipe_hooks_exist():
    from mvp_engine.kit import MLLMEngine

    text = (ROOT / "docs" / "recipes.md").read_text().partition("## Logging backends")[0]
    for name in set(re.findall(r"`([a-z_]+)\(", text)) - {"super", "eval"}:
        assert hasattr(MLLMEngine, name), name


def test_docs_walk_of_a_step_names_lines_of_seven_files():
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"\[`[\w/.]+:(\d+)`\]\(\.\./([\w/.]+)#L(\d+)\) `(\w+)`", text)
    sources = {file: (ROOT / file).read_text().splitlines() for _, file, _, _ in steps}
    for line, file, anchor, name in steps:
        defined = [
            number
            for number, code in enumerate(sources[file], 1)
            if re.match(rf"\s*(def|class) {name}\b", code)
        ]
        assert int(line) == int(anchor) == defined[0], f"{file}: {name} is in line {defined[0]}"
    assert len(sources) == 7
    assert sum(map(len, sources.values())) <= 2200
