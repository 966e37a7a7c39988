#!/bin/sh
# Generates kvcluster/wire/v1 from proto/kvcluster/v1:  tools/proto.sh PYTHON
# PYTHON has grpcio-tools 1.62.3, whose compiler is that of protobuf 4.25 (docs/adr/0002). Messages only: services are
# tables of methods (kvcluster/wire/methods.py), so no *_pb2_grpc.py is made.
set -eu
python=${1:?"usage: tools/proto.sh PYTHON, one that has grpcio-tools==1.62.3"}
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$made" --pyi_out="$made" proto/kvcluster/v1/*.proto
# The protocol's package is kvcluster.v1; the generated modules live below kvcluster.wire and import one another there.
sed -i 's/^from kvcluster\.v1 import/from kvcluster.wire.v1 import/' "$made"/kvcluster/v1/*_pb2.py*
rm -f kvcluster/wire/v1/*_pb2.py kvcluster/wire/v1/*_pb2.pyi
cp "$made"/kvcluster/v1/*_pb2.py "$made"/kvcluster/v1/*_pb2.pyi kvcluster/wire/v1/
