"""The protocol: core messages <-> bytes, in the only room that sees both protobuf and the core.

Everything from outside passes here once, and what comes out has the shapes that the core asserts: hashes of 32
bytes, rectangles that are some, lists that agree in length, nothing over core/limits.py. Whatever is
malformed raises ProtocolError, LimitError or SpecError, and nothing else.

    methods.py      a table of the unary methods of both services: what servers and clients use
    frames.py       the streams of pages, and tickets: bytes that no protobuf service describes
    coordinator.py, reports.py, shard.py     what each party sends;     common.py, pages.py     what they share
    v1/             generated from proto/kvcluster/v1, which documents the protocol
"""
