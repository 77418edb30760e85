"""The checks that import torch, in a process of their own: a broken library may end it with a signal.

`python -m mvp_engine.tools.doctor.probe FD JSON` writes one JSON line per finding to the file descriptor, and the name
of each check before it starts, so that the parent knows which one ended the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.tools.doctor.finding import Finding, problem

Found = Finding | list[Finding] | None
CHECKS = ["driver", "cuDNN", "GPUs", "attention", "loss", "torch.compile", "FP8", "NF4", "mixers"]
CHECKS += ["image", "video", "audio", "disk"]
# Where the lines of the terminal belong.
HEADINGS = {"driver": "GPUs", "attention": "Kernels", "image": "Media", "disk": "Disk"}


@dataclass(frozen=True)
class Request:
    """What the command was asked for: a config, its overrides, and the folder of the runs."""

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    dir: str | None = None


def main(argv: list[str]) -> int:
    names, request = json.loads(argv[1])
    with os.fdopen(int(argv[0]), "w", buffering=1) as out:
        for kind, value in run_checks(names, Request(**request)):
            out.write(json.dumps({kind: value}) + "\n")
    return 0


def run_checks(names: Iterable[str], request: Request) -> Iterator[tuple[str, Any]]:
    """("begin", name) before each check, then ("finding", its fields)."""
    for name in names:
        yield "begin", name
        for finding in _run(name, request):
            yield "finding", dataclasses.asdict(finding)


def _run(name: str, request: Request) -> list[Finding]:
    try:
        found = _check(name, request)
    except UserError as error:  # of the config's model
        return [problem(name, str(error), "correct the config, or run mvp doctor without one")]
    except Exception as error:  # noqa: BLE001 - one broken check must not end the others
        text = f"the check failed: {type(error).__name__}: {str(error)[:300]}"
        return [problem(name, text, "reinstall the package that the message names")]
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def _check(name: str, request: Request) -> Found:
    from mvp_engine.tools.doctor import gpus, kernels, media

    if name == "disk":
        return _check_disk(request)
    if name == "attention":
        return kernels.check_attention(_head_size(request))
    if name in media.FILES:
        return media.check_media(name)
    checks: dict[str, Callable[[], Found]] = {
        "driver": gpus.check_driver,
        "cuDNN": gpus.check_cudnn,
        "GPUs": gpus.check_gpus,
        "loss": kernels.check_loss,
        "torch.compile": kernels.check_compile,
        "FP8": kernels.check_fp8,
        "NF4": kernels.check_nf4,
        "mixers": kernels.check_mixers,
    }
    return checks[name]()


def _composed(request: Request) -> Any:
    """The config, or None where none was given."""
    from mvp_engine.config import compose

    return compose(request.config, request.overrides).config if request.config else None


def _head_size(request: Request) -> int:
    from mvp_engine.tools.doctor.checkpoint_size import head_size

    config = _composed(request)
    return (head_size(config) if config else None) or 128


def _check_disk(request: Request) -> Finding:
    from mvp_engine.tools.doctor.checkpoint_size import checkpoint_sizes
    from mvp_engine.tools.doctor.host import check_disk

    config = _composed(request)
    folder = request.dir or (config.project.dir if config else "outputs")
    return check_disk(Path(folder), checkpoint_sizes(config) if config else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
