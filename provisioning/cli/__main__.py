"""``python -m provisioning.cli`` is ``lethe-owner``."""

from provisioning.cli import main

main()
