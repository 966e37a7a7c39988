"""Every ray.* call: the shard and coordinator actors, and starting, finding and stopping a cluster of them."""
