"""Which architectures of vLLM's registry kvcluster serves: found over vLLM's own objects, written to docs/models.md.

`make models` builds every generative model of the registry on torch's meta device from a small configuration
(configs.py, written.py), asks its layers for their KV, lets vLLM group it and kvcluster refuse it (examine.py), and
writes what came of it: result.json, docs/models.md (page.py), and kvcluster/core/architectures.py, by which
`kvcluster doctor --model` answers without vLLM.
"""
