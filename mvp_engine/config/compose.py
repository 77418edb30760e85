"""From a YAML file and `key=value` overrides to a validated config: Hydra composes, pydantic validates.

`default.yaml` comes first, then the recipe's YAML with the files that its `defaults:` list inherits, then the
command line. `explain.py` writes the error messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from mvp_engine.config.engine_class import find_engine
from mvp_engine.config.explain import explain_invalid
from mvp_engine.config.places import ConfigFile, override_key, place_of, short_path
from mvp_engine.config.schema import Config
from mvp_engine.config.shipped import shipped_config, shipped_configs
from mvp_engine.errors import UserError, did_you_mean, similar_path
from mvp_engine.runs import flat_keys

if TYPE_CHECKING:
    from mvp_engine.engine import Engine

# libyaml's parser, where PyYAML has it, takes a tenth of the time.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEFAULTS = Path(__file__).parent / "default.yaml"


@dataclass(frozen=True)
class Composed:
    """A validated config, its engine class, and the files that it was composed from (later ones win)."""

    config: Config
    engine_class: type[Engine]
    files: list[Path]


@dataclass(frozen=True)
class Draft:
    """The values of all files and overrides, before a schema validates them."""

    file: Path
    files: list[ConfigFile]
    overrides: list[str]
    values: dict[str, Any]
    missing: list[str]  # keys that have no value (???)

    def validated(self, schema: type[Config], engine: str) -> Config:
        problems: list[str] = []
        try:
            config = schema.model_validate({**self.values, "engine": engine})
        except ValidationError as error:
            # Next to missing values, unknown keys only: a misspelt one is often the one without a value.
            found = explain_invalid(error, schema, self.files, self.overrides, bool(self.missing))
            problems = list(dict.fromkeys(found))
        if self.missing:
            raise MissingKeys(self.file, self.missing, problems)
        if problems:
            raise UserError("\n".join(problems))
        return config


class MissingKeys(UserError):
    """Keys that have no value (???) in the files and none on the command line."""

    def __init__(self, file: Path, keys: list[str], unknown: Sequence[str] = ()) -> None:
        """`unknown`: what is said about unknown keys, one line each."""
        words = " ".join(f"{key}=..." for key in keys)
        text = (
            f"{short_path(file)} has keys without a value (???); give on the command line: {words}"
        )
        super().__init__("\n".join([*unknown, text]))
        self.keys = keys


def compose(path: str | Path, overrides: list[str] | None = None) -> Composed:
    """Compose and validate the config at `path`; raises `UserError` with what is wrong, where, and the fix."""
    draft = read_draft(path, overrides or [], incomplete=True)
    engine_class, engine = find_engine(draft.values.get("engine"), draft.file)
    config = draft.validated(engine_class.config_class, engine)
    return Composed(config, engine_class, [source.path for source in draft.files])


def read_draft(path: str | Path, overrides: list[str], incomplete: bool = False) -> Draft:
    """`incomplete`: keys without a value are not an error yet, but in `Draft.validated`."""
    file = _find_file(Path(path).expanduser())
    roots = _search_roots(file)
    files = [ConfigFile(DEFAULTS, ""), *_inherited(file, roots)]
    values, missing = _compose_values(file, roots, files, overrides)
    if missing and ("engine" in missing or not incomplete):
        raise MissingKeys(file, missing)
    engine = values.get("engine")
    if engine is not None and not isinstance(engine, str):
        place = place_of("engine", files, overrides)
        raise UserError(f"{place}: 'engine' is {engine!r}. Write file.py:Class")
    return Draft(file, files, overrides, values, missing)


# ---- Files ------------------------------------------------------------------------------------------


def _find_file(file: Path) -> Path:
    """The absolute path of an existing YAML file, or of a shipped recipe's config such as `sft/lora`."""
    if file.is_file():
        if file.suffix != ".yaml":
            raise UserError(f"config {file} must be called *.yaml: Hydra reads no other files")
        return file.resolve()
    shipped = shipped_config(file)
    if shipped is not None:
        return shipped
    if file.is_dir():
        raise UserError(f"config {file} is a folder; name a YAML file. {_yaml_files(file)}")
    raise UserError(f"config file not found: {file}.{similar_path(file) or _other_files(file)}")


def _other_files(file: Path) -> str:
    shipped = [] if file.is_absolute() else shipped_configs(file.parts[0])
    if shipped:
        return f" The recipe has: {', '.join(shipped)}"
    return did_you_mean(str(file), shipped_configs()) or f" {_yaml_files(file.parent)}"


def _yaml_files(folder: Path) -> str:
    """The YAML files of a folder, or of a recipe's folder, in words."""
    files = sorted(folder.glob("[!.]*.yaml")) or sorted(folder.glob("configs/*.yaml"))
    if not files:
        return f"{folder} has no YAML file (paths are relative to {Path.cwd()})"
    return f"{folder} has: {', '.join(str(file.relative_to(folder)) for file in files)}"


def _search_roots(file: Path) -> list[Path]:
    """The folders in which `defaults:` entries are found: the file's own, then the `configs` folder around it."""
    outer = [folder for folder in file.parents[1:] if folder.name == "configs"]
    return [file.parent, *outer[:1]]


def _inherited(
    file: Path, roots: list[Path], heirs: tuple[Path, ...] = (), prefix: str = ""
) -> list[ConfigFile]:
    """The recipe's files in the order in which Hydra applies them; only used to find where a key was set."""
    if file in heirs:
        others = " and ".join(short_path(heir) for heir in heirs[1:]) or "itself"
        raise UserError(f"{short_path(file)} inherits from itself, through {others}")
    tree = load_yaml(file)
    entries = tree.get("defaults") or [] if isinstance(tree, dict) else []
    found: list[ConfigFile] = []
    for entry in entries:
        groups = entry if isinstance(entry, dict) else {"": entry}
        for group, name in groups.items():
            parent = _find_default(f"{group}/{name}" if group else str(name), roots)
            if parent is not None:
                inner = f"{prefix}{group.replace('/', '.')}." if group else prefix
                found += _inherited(parent, roots, (*heirs, file), inner)
    return [*dict.fromkeys(found), ConfigFile(file, prefix)]


def _find_default(name: str, roots: list[Path]) -> Path | None:
    """The file of a `defaults:` entry, such as `base` or `model/tiny@package`."""
    for root in roots:
        file = root / f"{name.split('@')[0].lstrip('/')}.yaml"
        if file.is_file():
            return file
    return None


def load_yaml(file: Path) -> Any:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), LOADER) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{short_path(file)} is not valid YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{short_path(file)} is not UTF-8 text: {error}") from None


# ---- Hydra ------------------------------------------------------------------------------------------


def _compose_values(
    file: Path, roots: list[Path], files: list[ConfigFile], overrides: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values of all files and overrides, and the keys without one; if all have one, interpolations are resolved."""
    if not isinstance(load_yaml(file), dict):
        raise UserError(f"{short_path(file)} must be a mapping of keys to values")
    GlobalHydra.instance().clear()
    try:
        words = [_hydra_override(word, roots) for word in overrides]
        if len(roots) > 1:
            words.append(f"hydra.searchpath=['file://{roots[1]}']")
        folder = initialize_config_dir(config_dir=str(file.parent), version_base="1.3")
        with folder, _own_store() as store:
            store.store("_mvp_root", {"defaults": ["_mvp_defaults", "_self_", file.stem]})
            composed = hydra_compose("_mvp_root", overrides=words)
        missing = OmegaConf.missing_keys(composed) | _open_keys(files[1:], composed, overrides)
        values = OmegaConf.to_container(composed, resolve=not missing)
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(line for line in str(error).splitlines() if line.strip())
        text = text.split(" Config search")[0]
        raise UserError(f"{short_path(files[-1].path)} does not compose: {text}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, sorted(missing)


class _Configs(dict[str, Any]):
    """What Hydra's store holds. Hydra copies all of it in each composition, and then again what it reads."""

    def __deepcopy__(self, _: object) -> _Configs:
        return self


_OWN_CONFIGS = _Configs()


@contextlib.contextmanager
def _own_store() -> Iterator[ConfigStore]:
    """A context in which Hydra's store holds `default.yaml`, and no settings of Hydra (loggers, sweepers).

    It is filled once: that would be half of the time of a composition.
    """
    store = ConfigStore.instance()
    outside = store.repo
    store.repo = _OWN_CONFIGS
    try:
        if not _OWN_CONFIGS:
            store.store("_mvp_defaults", OmegaConf.load(DEFAULTS))
            store.store("config", HydraConf(defaults=[]), group="hydra")
        yield store
    finally:
        store.repo = outside


def _open_keys(files: list[ConfigFile], composed: Any, overrides: list[str]) -> set[str]:
    """Keys that are ??? in the files, over a default: Hydra silently keeps the default, such as null."""
    values = dict[str, object]()
    for file in files:
        for key, value in flat_keys(load_yaml(file.path)).items():
            values[f"{file.prefix}{key}"] = value
    given = [override_key(word) for word in overrides]
    found = set[str]()
    for key, value in values.items():
        is_given = any(f"{key}.".startswith(f"{one}.") for one in given)
        section = key.rpartition(".")[0] or key
        if value == "???" and not is_given and OmegaConf.select(composed, section) is not None:
            found.add(key)
    return found


def _hydra_override(word: str, roots: list[Path]) -> str:
    """The override as Hydra expects it: `++key=value`, since a key may be known to the schema alone.

    A word that selects a file of a config group (`model=tiny` next to a folder `model/`) stays as it is.
    """
    if "=" not in word and not word.startswith("~"):
        raise UserError(f"{word!r} on the command line is not of the form key=value")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{word!r} on the command line cannot be read: {reason}") from None
    if override.is_sweep_override():
        key, _, value = word.partition("=")
        raise UserError(
            f"{word!r} on the command line has several values, and a training takes one: start one for each. A list is "
            f"{key}=[{value}], a text with a comma \"{key}='{value}'\""
        )
    if override.key_or_group.startswith("hydra"):
        raise UserError(f"{word!r} on the command line: Hydra's own settings have no effect here")
    is_group = any((root / override.key_or_group).is_dir() for root in roots)
    return word if word[0] in "+~" or is_group else f"++{word}"
