"""`mvp data inspect`: of a config, or of a data file with or without a model. Without one it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mvp_engine.config.shipped import shipped_config
from mvp_engine.errors import UserError, count


def print_inspection(
    what: str,
    overrides: list[str],
    *,
    model: str | None,
    split: str,
    row: str | None,
    limit: int,
    pack_tokens: int,
    decode: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Inspect a config's data, or a data file: with the processor of `model`, else only as it is read.

    With `strict`, rows that cannot be trained on are an error, after everything is printed.
    """
    if Path(what).suffix in (".yaml", ".yml") or shipped_config(Path(what)):
        facts = _inspect_config(what, overrides, model, split, limit=limit, row=row, decode=decode)
    elif overrides:
        raise UserError(
            f"{overrides[0]!r}: only a config has keys to override, {what} is no YAML file"
        )
    elif model:
        from mvp_engine.tools.inspect import file_data_kit, inspect_kit

        kit = file_data_kit(what, model, pack_tokens)
        facts = inspect_kit(kit, split, 1, limit=limit, row=row, decode=decode)
    elif decode:
        raise UserError("--decode needs the processor of a model: give --model MODEL too")
    else:
        from mvp_engine.tools.inspect_file import inspect_file

        facts = inspect_file(what, limit=limit, row=row)
    facts = {"data": what, "model": model, **facts}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        from rich.console import Console

        from mvp_engine.tools.inspect_page import show

        show(facts, Console(highlight=False), in_full=row is not None)
    if strict:
        _refuse_unusable(facts)


def _inspect_config(
    file: str, overrides: list[str], model: str | None, split: str, **options: Any
) -> dict[str, Any]:
    from mvp_engine.config import compose
    from mvp_engine.tools.inspect import config_data_kit, inspect_kit

    composed = compose(file, overrides)
    kit = config_data_kit(composed.engine_class, composed.config, model)
    data = composed.config.data
    packs = kit.settings.global_batch_packs(data.global_batch_size) or data.micro_batch_size
    return inspect_kit(kit, split, packs, **options)


def _refuse_unusable(facts: dict[str, Any]) -> None:
    rows = sum(source["rows"] for source in facts["sources"])
    unusable = rows - sum(source["good"] for source in facts["sources"])
    if unusable:
        raise UserError(
            f"--strict: {unusable:,} of {count(rows, 'row')} of {facts['data']} cannot be trained on"
        )
