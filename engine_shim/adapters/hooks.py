"""Puts our code around methods of one engine's objects, takes it off, and lets another part replace what is inside.

A hook is an attribute of the *instance*, so it touches one engine, and removing it leaves the engine as it was. Inside
a hook stands `inner`: the method that the engine has, or the hook that was there before, as those of vLLM's relocating
allocation stand inside of those of observation. Only such a layer changes what an engine does; observation alone never
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


class Hook:
    """One method of one object. `inner` is called in the method's place, by the wrapper around it."""

    __slots__ = ("_had_own", "_stock", "_wrapper", "inner", "name", "owner")

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.name = name
        self._had_own = name in vars(owner)
        self._stock: Method = getattr(owner, name)
        self.inner: Method = self._stock
        self._wrapper: Method | None = None

    def put(self, wrapper: Method) -> None:
        """Let calls of the method go to `wrapper`."""
        wrapper.__kvatlas_hook__ = self  # type: ignore[attr-defined]  # how a hooked method is told from a stock one
        self._wrapper = wrapper
        setattr(self.owner, self.name, wrapper)

    @property
    def stock(self) -> Method:
        """The method as it was found, bound to its object."""
        return self._stock

    def remove(self) -> None:
        """Give the object its method back. Where somebody has wrapped it again since, ours stays inside of theirs.

        Hook and wrapper hold each other no longer: vLLM takes what its start has made out of the garbage collector's
        sight, and whatever a circle there holds would stay for good.
        """
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is None or vars(self.owner).get(self.name) is not wrapper:
            return
        if self._had_own:
            setattr(self.owner, self.name, self._stock)
        else:
            vars(self.owner).pop(self.name, None)


class Hooks:
    """The hooks of one engine, in the order in which they were put in."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def wrap(self, owner: object, name: str, around: Callable[[Hook], Method]) -> Hook:
        """Replace `owner.name` by `around(hook)`, which must call `hook.inner` first and return what it returns."""
        hook = Hook(owner, name)
        hook.put(around(hook))
        self._hooks.append(hook)
        return hook

    def find(self, owner: object, name: str) -> Hook | None:
        """The hook on that method, for a layer that changes what is inside."""
        return next((hook for hook in self._hooks if hook.owner is owner and hook.name == name), None)

    def drop(self, hook: Hook) -> None:
        """Take one hook off and hold its object no longer: the engine has replaced it by another."""
        hook.remove()
        self._hooks = [one for one in self._hooks if one is not hook]

    def remove_all(self) -> None:
        """Leave every object as it was found, the last hook first. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def __len__(self) -> int:
        return len(self._hooks)


def after(then: Callable[..., None], fault: Callable[[BaseException], None]) -> Callable[[Hook], Method]:
    """For `Hooks.wrap`: call `then(result, *arguments, **keywords)` when the engine's method has returned.

    What `then` raises goes to `fault`, and the engine gets its result.
    """

    def around(hook: Hook) -> Method:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = hook.inner(*args, **kwargs)
            try:
                then(result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the engine
                fault(error)
            return result

        return wrapper

    return around


def is_hooked(owner: object, name: str) -> bool:
    """Does a hook of ours stand on that method?"""
    return hasattr(getattr(owner, name, None), "__kvatlas_hook__")
