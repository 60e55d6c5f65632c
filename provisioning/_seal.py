"""The mint of this floor: only checkers hold it, so only they can make proof objects.

An import contract (pyproject.toml) lists the modules that may import ``MINT``.
"""

from typing import Final, final


@final
class Mint:
    """A token without content; identity is all that counts."""

    __slots__ = ()


MINT: Final = Mint()
