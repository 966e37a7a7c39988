"""Codecs of engine registration and of the list of engines."""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.messages import EngineInfo, Engines, GetEngines, Registered, RegisterEngine, SetWeights
from kvcluster.core.spec import check_weights
from kvcluster.errors import ProtocolError, SpecError
from kvcluster.wire import common
from kvcluster.wire.common import agree, at_most, quantity, text
from kvcluster.wire.v1 import coordinator_pb2 as pb


def encode_register_engine(question: RegisterEngine) -> bytes:
    """Encodes the registration of a live engine."""
    return pb.RegisterEngineRequest(engine=_encode_info(question.info)).SerializeToString()


def decode_register_engine(data: bytes) -> RegisterEngine:
    """The inverse."""
    return RegisterEngine(_decode_info(common.parse(pb.RegisterEngineRequest, data).engine))


def encode_get_engines(question: GetEngines) -> bytes:
    """Encodes the question for the live engines."""
    return pb.GetEnginesRequest().SerializeToString()


def decode_get_engines(data: bytes) -> GetEngines:
    """The inverse."""
    common.parse(pb.GetEnginesRequest, data)
    return GetEngines()


def encode_set_weights(question: SetWeights) -> bytes:
    """Encodes the weights under which private engines are to cache."""
    m = pb.SetWeightsRequest(model=question.model, weights=question.weights, engine=question.engine)
    return m.SerializeToString()


def decode_set_weights(data: bytes) -> SetWeights:
    """The inverse. Raises ProtocolError for weights that are not pinned, as a spec does."""
    m = common.parse(pb.SetWeightsRequest, data)
    weights = text(m.weights, "weights")
    try:
        check_weights(weights)
    except SpecError as error:
        raise ProtocolError(str(error)) from None
    return SetWeights(text(m.model, "a model"), weights, text(m.engine, "an engine"))


def decode_registered(m: pb.Registered) -> Registered:
    """Decodes the answer to a registration."""
    return Registered(quantity(m.ttl_ns, "nanoseconds"), text(m.weights, "weights"))


def encode_engines(reply: Engines) -> pb.Engines:
    """Encodes the live engines."""
    return pb.Engines(
        engines=[_encode_info(info) for info, _ in reply.known], seen_ns_ago=[ago for _, ago in reply.known]
    )


def decode_engines(m: pb.Engines) -> Engines:
    """The inverse."""
    at_most(agree("engines", m.engines, m.seen_ns_ago), limits.LISTED_ENGINES, "engines")
    ago = [quantity(ns, "nanoseconds") for ns in m.seen_ns_ago]
    return Engines(tuple(zip([_decode_info(one) for one in m.engines], ago, strict=True)))


def _encode_info(info: EngineInfo) -> pb.Engine:
    return pb.Engine(
        engine=info.engine,
        name=info.name,
        model=info.model,
        weights=info.weights,
        fact_names=[name for name, _ in info.facts],
        fact_values=[value for _, value in info.facts],
        private=info.private,
        withdrawn=info.withdrawn,
        ready=info.ready,
    )


def _decode_info(m: pb.Engine) -> EngineInfo:
    at_most(agree("facts", m.fact_names, m.fact_values), limits.ENGINE_FACTS, "facts of an engine")
    names = [text(name, "a fact") for name in m.fact_names]
    values = [text(value, "a fact") for value in m.fact_values]
    if not m.engine:
        raise ProtocolError("an engine must have an id")
    return EngineInfo(
        engine=text(m.engine, "an engine"),
        name=text(m.name, "a name"),
        model=text(m.model, "a model"),
        weights=text(m.weights, "weights"),
        facts=tuple(zip(names, values, strict=True)),
        private=m.private,
        withdrawn=quantity(m.withdrawn, "withdrawals"),
        ready=m.ready,
    )
