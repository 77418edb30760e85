"""Versions: Python and the packages that the engine uses, against the versions that its tests ran on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from dataclasses import dataclass

from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

PYTHON = ("3.11", "3.12")


@dataclass(frozen=True)
class Package:
    """The lowest and the newest version that the tests ran on."""

    lowest: str
    newest: str
    use: str = ""  # what it is needed for, if a training can do without
    extra: str = ""
    module: str = ""  # the name to import, if it is another
    only: str = ""  # the setting that needs it: it is not missing on other machines


PACKAGES = {
    "torch": Package("2.11", "2.15"),
    "transformers": Package("5.19", "5.22"),
    "huggingface-hub": Package("1.31", "2.4", module="huggingface_hub"),
    "numpy": Package("2", "2.4"),
    "safetensors": Package("0.8", "0.8"),
    "hydra-core": Package("1.3.2", "1.3.8", module="hydra"),
    "pydantic": Package("2.11", "2.14"),
    "pillow": Package("11", "13", module="PIL"),
    "torchvision": Package("0.26", "0.29"),
    "pyarrow": Package("17", "26", "parquet and arrow files", "data"),
    "av": Package("18.1", "19", "video", "data"),
    "soundfile": Package("0.13", "0.14", "audio", "data"),
    "soxr": Package("0.5", "1.1", "audio of another sampling rate", "data"),
    "ray": Package("2.44", "2.60", extra="ray", only="workers.where=ray"),
}


def check_software() -> list[Finding]:
    return [_check_python(), *(_check_package(name, package) for name, package in PACKAGES.items())]


def _check_python() -> Finding:
    version = platform.python_version()
    text = f"{version} ({sys.executable})"
    return _compare("python", version, text, *PYTHON, f"install Python {PYTHON[1]}")


def _check_package(name: str, package: Package) -> Finding:
    install = f"pip install {name}"
    if package.extra:
        install = f"pip install 'mvp-engine[{package.extra}]'"
    if importlib.util.find_spec(package.module or name) is None:
        if package.only:
            return ok(name, f"not installed: only {package.only} needs it ({install})")
        if package.use:
            return warning(name, f"not installed: needed for {package.use}", install)
        return problem(name, "not installed", install)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ok(name, "found on the path, without a version")
    return _compare(
        name, version, version, package.lowest, package.newest, f"pip install -U {name}"
    )


def _compare(name: str, version: str, text: str, lowest: str, newest: str, upgrade: str) -> Finding:
    tested = lowest if lowest == newest else f"{lowest} to {newest}"
    facts = {"version": version, "lowest": lowest, "newest": newest}
    if numbers(version) < numbers(lowest):
        return problem(
            name, f"{text} is older than the lowest supported, {lowest}", upgrade, **facts
        )
    # 2.13.1 is a patch release of a tested 2.13.
    length = len(numbers(newest))
    if numbers(version)[:length] > numbers(newest):
        fix = f"if something fails, install the newest tested version: pip install '{name}=={newest}.*'"
        if name == "python":
            fix = f"if something fails, use Python {newest}"
        return warning(name, f"{text} is newer than the newest tested, {newest}", fix, **facts)
    return ok(name, f"{text} (tested: {tested})", **facts)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare: (2, 13, 0) of 2.13.0+cu130."""
    release = re.split(r"[^\d.]", version)[0]
    return tuple(int(number) for number in release.split(".") if number)
