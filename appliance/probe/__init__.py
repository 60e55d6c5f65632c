"""Measuring what a load is made of: the medium, the cipher, the copy to a device; then a load itself.

``lethe bench load`` runs this package as a process of its own, because the command line imports no tensors.
``benchmarks/sealed_load.py`` measures with the same functions, so the two agree.
"""
