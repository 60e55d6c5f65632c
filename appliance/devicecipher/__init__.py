"""AES-256 in counter mode on a device, free of tables: the half of AES-256-GCM that turns ciphertext into plaintext.

No table is indexed by a secret and no branch depends on one, so what runs beside it on the device learns nothing from
its time. Two forms that give the same bytes: torch operations on any device, and one Triton kernel on GPUs.
"""
