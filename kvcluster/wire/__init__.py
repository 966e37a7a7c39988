"""The protocol: core messages <-> bytes, in the only package that imports both protobuf and the core.

Everything from outside is decoded here once, and the results have the shapes that the core asserts: hashes of 32 bytes,
non-empty rectangles, lists of equal length, nothing beyond core/limits.py. Malformed input raises ProtocolError,
LimitError or SpecError, and nothing else.

    methods.py      a table of the unary methods of both services, for servers and clients
    frames.py       the streams of pages, and tickets: bytes that no protobuf service describes
    socket_frames.py, shm_frames.py     frames on plain sockets, for tcp and shm
    checks.py       the checks of single values, and what they raise
    fields.py       how a message is declared: once, for both directions, with its bounds
    coordinator.py, answers.py, reports.py, shard.py     the declarations;     common.py     what they share
    v1/             generated from proto/kvcluster/v1, which documents the protocol
"""
