"""Methods as another version of an engine may have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

MORE = "new_in_this_version"


def takes_more(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The method with one parameter more, which may be left out."""

    def method(self: Any, *args: Any, new_in_this_version: bool = False, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    more = inspect.Parameter(MORE, inspect.Parameter.KEYWORD_ONLY, default=False)
    signature = inspect.signature(stock)
    vars(method)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), more])
    return method
