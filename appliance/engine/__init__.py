"""The built-in engine: decoder-only transformers of the Llama family, many requests at once.

It knows nothing of bundles, keys or evidence: it takes a ``ResidentModel`` and messages of ``appliance.protocol``.

Read in this order: ``config`` (what a model's config.json may say); ``rope``, ``layers``, ``attention`` and ``model``
(the network); ``blocks`` (the KV cache); ``sequence``, ``scheduler`` and ``batch`` (who runs in a step); ``sampler``
(which token follows); ``engine`` (one step of all that).
"""
