"""The base class of objects that belong to the process that made them, and so are neither pickled nor copied."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from kvcluster.errors import CallerError


class Unpicklable:
    """Raises CallerError when it is pickled or copied. `instead` names what to pass to the other process."""

    instead: ClassVar[str] = "connect in the other process"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise CallerError(f"a {kind} belongs to its process and cannot be pickled or copied: {self.instead}")
