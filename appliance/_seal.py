"""The mint of this floor: only the loader holds it, so only a finished load can make a resident model.

An import contract (pyproject.toml) lists the modules that may import ``MINT``.
"""

from typing import Final, final


@final
class Mint:
    """A token without content; identity is all that counts."""

    __slots__ = ()


MINT: Final = Mint()
