"""Is this machine what it says it is, and is that acceptable: the lowest floor, usable on its own and offline.

Evidence (``evidence``) bound to one session (``binding``) is judged under the owner's policy (``policy``, ``rule``) by
``appraise``, which gives a proof with its whole trail (``result``). One package per platform holds what that platform's
evidence looks like and how it is verified (``simulated``). ``strictjson``, ``signature`` and ``dsse`` read and write
signed objects for all floors; ``errors``, ``proof`` and ``clock`` are the shapes that all floors share.
"""
