"""What the architectures of vLLM keep. Written by `make models`."""

SERVED: tuple[tuple[tuple[str, ...], str], ...] = ()
REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = ()
UNREAD = ""
NOT_EXAMINED = ""
