"""Everything that reads bytes from outside, by name."""

from __future__ import annotations

from tests.fuzz.attend_parsers import attend_parsers
from tests.fuzz.contract import Parser
from tests.fuzz.copy_parsers import copy_parsers
from tests.fuzz.event_parsers import event_parsers
from tests.fuzz.file_parsers import file_parsers
from tests.fuzz.shm_parsers import shm_parsers
from tests.fuzz.stream_parsers import stream_parsers
from tests.fuzz.text_parsers import text_parsers
from tests.fuzz.wire_parsers import wire_parsers

_ALL = (
    *wire_parsers(),
    *stream_parsers(),
    *attend_parsers(),
    *shm_parsers(),
    *copy_parsers(),
    *text_parsers(),
    *file_parsers(),
    *event_parsers(),
)
PARSERS: dict[str, Parser] = {parser.name: parser for parser in _ALL}
