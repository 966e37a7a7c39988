"""Plants bugs: patches of the code under test, which last for as long as a run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kvcluster.errors import CallerError

Mistake = Callable[..., Any]
"""Is called in place of a function of the code under test, with that function as its first argument."""


@dataclass(frozen=True, slots=True)
class Bug:
    """`breaks` says what is wrong. Each of `patches` is an owner, the name of one of its attributes, and the value that
    replaces it. `first`: the first seed from which a search for it makes sense."""

    breaks: str
    first: int = 0
    patches: list[tuple[Any, str, Any]] = field(default_factory=list)

    def also(self, owner: Any, attribute: str) -> Callable[[Mistake], Mistake]:
        """Has the decorated function called in place of `owner.attribute` as well."""

        def add(mistake: Mistake) -> Mistake:
            original = vars(owner)[attribute]

            def instead(*arguments: Any, **options: Any) -> Any:
                return mistake(original, *arguments, **options)

            self.patches.append((owner, attribute, property(instead) if isinstance(original, property) else instead))
            return mistake

        return add


BUGS: dict[str, Bug] = {}
"""The bugs by name."""


def planted(owner: Any, attribute: str, *, first: int = 0) -> Callable[[Mistake], Bug]:
    """Adds a bug: the decorated function is called in place of `owner.attribute`. The bug has the function's name, and
    the docstring says what it breaks."""

    def add(mistake: Mistake) -> Bug:
        bug = BUGS[mistake.__name__.replace("_", "-")] = Bug(mistake.__doc__ or "", first)
        bug.also(owner, attribute)(mistake)
        return bug

    return add


@contextmanager
def planted_bug(name: str | None) -> Iterator[None]:
    """Plants this bug in the code under test for the duration of the block. Raises CallerError if there is none of that
    name."""
    if name is not None and name not in BUGS:
        raise CallerError(f"there is no planted bug {name!r}; known: {', '.join(BUGS)}")
    with ExitStack() as stack:
        for owner, attribute, instead in BUGS[name].patches if name is not None else ():
            stack.enter_context(patch.object(owner, attribute, instead))
        yield
