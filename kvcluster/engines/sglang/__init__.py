"""SGLang: a HiCache storage backend, so that every engine replica can load the KV that any other has prefilled.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvcluster", "module_path": "kvcluster.engines.sglang", "class_name": "KVClusterStorage",
        "interface_v1": 1, "address": "host:7070", "weights": "sha256:..."}'

SGLang moves pages between the GPU and its host pool, and asks its storage backend for pages that the pool lacks, by
its own page hashes; this backend moves them between the pool's memory and the cluster. It refuses configurations that
it cannot name or does not understand while the engine starts. After that, every failure of the cluster is a miss.
"""

from kvcluster.engines.sglang.storage import KVClusterStorage

__all__ = ["KVClusterStorage"]
