"""A forward with other functions in its namespace: a copy of the function; its class and module stay unchanged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def forward_with(module_class: type, replacements: Mapping[str, Any]) -> Callable[..., Any]:
    """The forward of a class, with other values for these global names."""
    function: Any = inspect.unwrap(module_class.forward)  # type: ignore[attr-defined]
    # With the name of the module, torch.compile would look the values up in the module.
    namespace = {**function.__globals__, **replacements}
    del namespace["__name__"]
    copy = FunctionType(
        function.__code__.replace(),  # torch.compile keeps what it compiled by code, not by function
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy
