"""The platform ``simulated``: evidence signed by a laboratory's own root, for laptops, laboratories and CI.

It is a platform of its own, with its own magic, its own certificate form and its own root key type, so that no verifier
of hardware evidence can read it and its verifier can read nothing else. It carries the fields that real evidence
carries, so every refusal can be drilled without hardware. Whatever it proves, the result's assurance is ``lab``.
"""
