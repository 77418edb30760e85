"""The hook of the documentation site (mkdocs.yml): navigation, and pages that are not files of docs/.

These are the README as the first page, the changelog, the recipes' READMEs, notebooks, and an API reference from
docstrings. Links of pages stay as GitHub needs them; here those to files outside of the site lose their target.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# (title, page of docs/, of OTHERS or of API). A page that does not exist is left out, and one that is missing here is
# listed under "More".
NAV: dict[str, list[tuple[str, str]]] = {
    "Start": [
        ("Quick start", "index.md"),
        ("Install", "install.md"),
        ("Commands and runs", "commands.md"),
        ("Coming from other trainers", "coming_from.md"),
        ("Frequent errors", "faq.md"),
        ("All pages", "pages.md"),
    ],
    "Tutorials": [
        ("Text: SFT from rows to a model", "tutorial_text.md"),
        ("Images: your own rows", "your_data.md"),
        ("GRPO on a real set", "grpo.md"),
        ("Notebook: text SFT", "tutorials/text_sft.md"),
        ("Notebook: a vision-language model", "tutorials/digits_vlm.md"),
        ("Notebook: GRPO", "tutorials/grpo.md"),
        ("A recipe of your own", "recipe_list.md"),
        ("Changes of a recipe, as diffs", "changes.md"),
    ],
    "How-to": [
        ("Check a config", "check.md"),
        ("Does it fit? How long?", "plan.md"),
        ("Which GPU", "hardware.md"),
        ("Python and notebooks", "python.md"),
        ("Models and data of the Hub", "hub.md"),
        ("Serve and use the result", "serving.md"),
        ("Evaluation harnesses", "harness.md"),
        ("Sweeps", "sweep.md"),
        ("Trackers", "trackers.md"),
        ("Several nodes, SLURM", "several_nodes.md"),
        ("Kubernetes", "kubernetes.md"),
        ("Test a machine", "doctor.md"),
        ("Faults", "faults.md"),
        ("Profile and tune", "performance.md"),
        ("Public data", "public_data.md"),
        ("Graft an encoder", "graft.md"),
    ],
    "Concepts": [
        ("Data and packs", "data.md"),
        ("Tool calls and reasoning", "tools_and_reasoning.md"),
        ("Shards and streams", "shards.md"),
        ("Object stores", "stores.md"),
        ("Models and layouts", "models.md"),
        ("Parts, freezing, LoRA", "model_kit.md"),
        ("Loss", "loss.md"),
        ("Losses of a whole step", "whole_step_loss.md"),
        ("Optimizers", "optim.md"),
        ("Preference", "preference.md"),
        ("Reward models", "reward_model.md"),
        ("Value models", "value_model.md"),
        ("Reinforcement learning", "rl.md"),
        ("Distillation", "distil.md"),
        ("Experts", "experts.md"),
        ("Pipeline parallel", "pipeline.md"),
        ("Megatron", "megatron.md"),
        ("Omni models", "omni.md"),
        ("Actions", "actions.md"),
        ("Flow matching", "flow.md"),
        ("MFU", "mfu.md"),
        ("Security", "security.md"),
        ("Glossary", "glossary.md"),
    ],
    "Recipes": [],  # filled below
    "Reference": [
        ("Config keys", "config.md"),
        ("Hooks of a recipe", "recipes.md"),
        ("Training from Python", "api/training.md"),
        ("Engine and hooks", "api/engine.md"),
        ("Kits", "api/kits.md"),
        ("Data kit", "api/data.md"),
        ("PackedBatch", "api/batch.md"),
        ("Model engine", "api/model_engine.md"),
        ("Reinforcement learning", "api/rl.md"),
        ("Adding a model type or backend", "model_engine.md"),
        ("Plug-ins", "plugins.md"),
        ("Changelog", "changelog.md"),
    ],
    "Maintainers": [
        ("Architecture", "architecture.md"),
        ("Contributing", "contributing.md"),
        ("Lab notebook", "lab-notebook.md"),
    ],
}
OTHERS = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# Page -> its title, a sentence, and the objects whose docstrings it shows.
API: dict[str, tuple[str, str, list[str]]] = {
    "training": (
        "Training from Python",
        "What `import mvp_engine` gives; [python.md](../python.md) shows it in use.",
        ["mvp_engine.api.train", "mvp_engine.api.load", "mvp_engine.api.Training", "mvp_engine.api.Metrics"],
    ),
    "engine": (
        "Engine and hooks",
        "The training loop and what a recipe may override; [recipes.md](../recipes.md) explains each hook.",
        [
            "mvp_engine.engine.engine.Engine",
            "mvp_engine.engine.hooks.EngineHooks",
            "mvp_engine.engine.hooks.StepContext",
        ],
    ),
    "kits": (
        "Kits",
        "Suites of calls for engines of language models: the engine that wires them, models, loss, optimizers, MFU.",
        [
            "mvp_engine.kit.mllm.MLLMEngine",
            "mvp_engine.kit.model.MLLMModelKit",
            "mvp_engine.hf.lora.lora_settings.Lora",
            "mvp_engine.kit.loss.TokenNormedLossKit",
            "mvp_engine.kit.optim.OptimKit",
            "mvp_engine.kit.mfu.MFUKit",
            "mvp_engine.kit.generation.EvalGenerationKit",
        ],
    ),
    "data": (
        "Data kit",
        "Rows to packs; [data.md](../data.md) has the formats and settings.",
        ["mvp_engine.kit.data.kit.MLLMDataKit", "mvp_engine.kit.data.settings.DataSource"],
    ),
    "batch": (
        "PackedBatch",
        "Sequences side by side, without padding.",
        ["mvp_engine.data.batch.PackedBatch", "mvp_engine.data.batch.Media"],
    ),
    "model_engine": (
        "Model engine",
        "One model on one parallel layout; [model_engine.md](../model_engine.md) adds a type or a backend.",
        ["mvp_engine.model_engine.base.ModelEngine", "mvp_engine.model_engine.base.Settings"],
    ),
    "rl": (
        "Reinforcement learning",
        "The engine of RL recipes; [rl.md](../rl.md) explains algorithms, rewards and episodes.",
        ["mvp_engine.kit.rl.engine.RLEngine", "mvp_engine.kit.rl.chat.Chat", "mvp_engine.kit.rl.episodes.Answer"],
    ),
}
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
FILE_LINK = re.compile(r"\[([\w./-]+\.(?:md|ipynb))\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    pages = {source: target for source, target in OTHERS.items() if (ROOT / source).is_file()}
    for readme in sorted(ROOT.glob("recipes/*/README.md")):
        name = readme.parent.name
        pages[f"recipes/{name}/README.md"] = f"recipes/{name}.md"
        NAV["Recipes"].append((name, f"recipes/{name}.md"))
    for notebook in sorted(ROOT.glob("docs/tutorials/*.ipynb")):
        pages[f"docs/tutorials/{notebook.name}"] = f"tutorials/{notebook.stem}.md"
    for source, target in pages.items():
        text = (ROOT / source).read_text()
        files.append(_page(config, target, source, notebook_page(text) if source.endswith("ipynb") else text))
    for name, (title, about, objects) in API.items():
        blocks = "\n\n".join(f"::: {one}" for one in objects)
        files.append(_page(config, f"api/{name}.md", f"docs/api/{name}.md", f"# {title}\n\n{about}\n\n{blocks}\n"))
    for image in sorted([*ROOT.glob("recipes/*/*.png"), *ROOT.glob("recipes/*/*.svg")]):
        target = f"images/recipes/{image.parent.name}_{image.name}"
        files.append(File.generated(config, target, content=image.read_bytes()))
        SOURCES[target] = str(image.relative_to(ROOT))
    config.nav = _nav({file.src_uri for file in files.documentation_pages()})
    return files


def _page(config: Any, target: str, source: str, text: str) -> File:
    page = File.generated(config, target, content=text)
    SOURCES[target] = source
    return page


SOURCES: dict[str, str] = {}  # of pages that are no file of docs/: page -> file of the repository


def _nav(pages: set[str]) -> list[dict[str, Any]]:
    listed = {page for entries in NAV.values() for _, page in entries}
    nav: list[dict[str, Any]] = []
    for section, entries in NAV.items():
        nav.append({section: [{title: page} for title, page in entries if page in pages]})
    if more := sorted(pages - listed):
        nav.append({"More": more})
    return nav


def on_page_markdown(text: str, page: Any, files: Any, **_: Any) -> str:
    """Links between files of the repository as links between pages of the site."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    targets = {f"docs/{file.src_uri}": file.src_uri for file in files}
    targets |= {of: target for target, of in SOURCES.items()}
    here = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        for candidate in (file, f"{file}/README.md"):
            if candidate in targets:
                return f"]({posixpath.relpath(targets[candidate], here or '.')}{anchor})"
        return "]{.file}" if (ROOT / file).exists() else match[0]

    titles = {target: title for entries in NAV.values() for title, target in entries}

    def title(match: re.Match[str]) -> str:
        """A link that shows the name of a file shows the title of its page."""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return f"[{titles.get(targets.get(file, ''), match[1])}]({match[2]}{match[3] or ''})"

    parts = re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(link, FILE_LINK.sub(title, part)) for part in parts[::2]]
    # A link to a file of the repository that is no page is its text.
    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\{\.file\}", r"\1", "".join(parts))


def notebook_page(text: str) -> str:
    """A notebook as Markdown: its texts, its code, and what the code printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(f"```python\n{source}\n```")
    return "\n\n".join(parts) + "\n"
