"""transformers: a `Cache` that begins filled with what any engine replica has computed before.

    client = kvcluster.connect(address, spec_of(model))
    ids = generate(client, model, input_ids, attention_mask, max_new_tokens=64)

`generate` loads, generates and stores. Those who call the model themselves use its two halves,
`PrefixCache.from_inputs` and `save`. What this engine cannot serve it refuses by name, before anything moves:
silence would mean wrong KV, which nobody notices in the text that comes out.
"""

from kvcluster.engines.transformers.cache import PrefixCache
from kvcluster.engines.transformers.generate import generate
from kvcluster.engines.transformers.spec import fingerprint, spec_of

__all__ = ["PrefixCache", "fingerprint", "generate", "spec_of"]
