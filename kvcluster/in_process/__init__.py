"""A whole cluster on threads of this process, without Ray and sockets: the coordinator's and the shards' hosts, joined
by calls, and the memory transport for pages."""
