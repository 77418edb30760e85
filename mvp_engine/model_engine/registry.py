"""The registry of model engines, by model type and backend: those of imported modules, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable

from mvp_engine import plugins
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.model_engine.base import ModelEngine

_REGISTRY: dict[tuple[str, str], type[ModelEngine]] = {}


def register(model_type: str, backend: str) -> Callable[[type[ModelEngine]], type[ModelEngine]]:
    """A class decorator: registers the model engine for a model type on a backend."""

    def add(engine: type[ModelEngine]) -> type[ModelEngine]:
        key = f"({model_type}, {backend})"
        if not (isinstance(engine, type) and issubclass(engine, ModelEngine)):
            raise TypeError(f"{key}: {engine!r} is no class that derives from ModelEngine")
        if missing := sorted(engine.__abstractmethods__):
            raise TypeError(f"{key}: {engine.__qualname__} lacks {', '.join(missing)}")
        known = _REGISTRY.setdefault((model_type, backend), engine)
        if _identity(known) != _identity(engine):
            raise ValueError(f"{key} is {known.__qualname__} already")
        _REGISTRY[model_type, backend] = engine  # the same class, if its file was loaded again
        return engine

    return add


def _identity(engine: type[ModelEngine]) -> tuple[str, str]:
    return engine.__module__, engine.__qualname__


def is_registered(model_type: str, backend: str = "fsdp") -> bool:
    return (model_type, backend) in _REGISTRY or _plugin(model_type, backend) in _plugins()


def model_types() -> set[str]:
    """Model types with an engine on any backend."""
    return {model_type for model_type, _ in _names()}


def engine_class(model_type: str, backend: str = "fsdp") -> type[ModelEngine]:
    """The model engine that is registered, or an error that lists those that are."""
    key = model_type, backend
    if key not in _REGISTRY:
        engine = plugins.load("model_engine", _plugin(*key))
        if engine is None:
            raise _unknown(*key)
        register(*key)(engine)
    return _REGISTRY[key]


def _unknown(model_type: str, backend: str) -> UserError:
    names = _names()
    known = ", ".join(f"{t} on {b}" for t, b in sorted(names))
    backends = {b for t, b in names if t == model_type}
    hint = (
        did_you_mean(backend, backends)
        if backends
        else did_you_mean(model_type, {t for t, _ in names})
    )
    return UserError(
        f"model.type={model_type} on model.backend={backend} is not registered.{hint} Registered: {known}."
    )


def _names() -> set[tuple[str, str]]:
    of_plugins = [name.partition(".") for name in _plugins()]
    return {*_REGISTRY, *((model_type, backend) for model_type, _, backend in of_plugins)}


def _plugins() -> dict[str, str]:
    return plugins.names("model_engine")


def _plugin(model_type: str, backend: str) -> str:
    return f"{model_type}.{backend}"
