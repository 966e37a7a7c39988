"""transformers: a `Cache` that starts with the KV that any engine replica has computed before.

    client = kvcluster.connect(address, spec_of(model))
    ids = generate(client, model, input_ids, attention_mask, max_new_tokens=64)

`generate` loads, generates and stores. Callers that run the model themselves use its two halves,
`PrefixCache.from_inputs` and `save`; or SequenceCache for contexts larger than this process's memory, which is what
`generate(..., offload=True)` does. Unsupported models and arguments are refused by name before anything moves:
otherwise KV could be wrong, which does not show in the generated text.
"""

from kvcluster.engines.transformers.cache import PrefixCache
from kvcluster.engines.transformers.generate import generate
from kvcluster.engines.transformers.sequence_cache import SequenceCache
from kvcluster.engines.transformers.spec import fingerprint, spec_of

__all__ = ["PrefixCache", "SequenceCache", "fingerprint", "generate", "spec_of"]
