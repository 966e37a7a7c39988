"""vLLM: a KV connector by which engine replicas share what they have prefilled (docs/vllm.md).

--kv-transfer-config '{"kv_connector": "KVClusterConnector", "kv_connector_module_path": "kvcluster.engines.vllm",
  "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"address": "127.0.0.1:7070"}}'
"""

from kvcluster.engines.vllm.connector import KVClusterConnector

__all__ = ["KVClusterConnector"]
