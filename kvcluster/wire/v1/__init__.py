"""Messages of protocol version 1, generated from proto/kvcluster/v1 by `make proto`; for kvcluster.wire alone."""
