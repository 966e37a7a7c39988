"""SGLang: the storage tier behind HiCache, so that what one engine replica has prefilled, every other loads.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvcluster", "module_path": "kvcluster.engines.sglang", "class_name": "KVClusterStorage",
        "interface_v1": 1, "address": "host:7070", "weights": "sha256:..."}'

SGLang moves pages between the GPU and its host pool, and asks its storage for those that the pool lacks, by hashes of
its own; this moves them between the pool's memory and the cluster. What it cannot name or does not understand it
refuses while the engine starts. Afterwards the cluster is never in the way: whatever ails it is a miss.
"""

from kvcluster.engines.sglang.storage import KVClusterStorage

__all__ = ["KVClusterStorage"]
