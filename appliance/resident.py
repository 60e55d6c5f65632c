"""ResidentModel: the proof that every segment of this rank was opened, once, into device memory.

Only the loader makes one. Serving takes it, so nothing can serve a model that is half there. It knows nothing of
bundles and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from appliance._seal import MINT, Mint
from attestation.proof import Proof

if TYPE_CHECKING:
    from appliance.engine.model import Decoder
    from appliance.slot import Slot


@final
class ResidentModel(Proof):
    """A model in device memory.

    Attributes:
        weight_bytes: device memory that the weights fill, bytes.
        segments: segments opened.
        seconds: time the load took.
        ring_bytes: host staging memory, bytes.
        peak_plaintext_bytes: most plaintext that lay in the ring at once, bytes.
    """

    __slots__ = ("_model", "_slot", "peak_plaintext_bytes", "ring_bytes", "seconds", "segments", "weight_bytes")

    def __init__(
        self,
        mint: Mint,
        *,
        model: Decoder,
        slot: Slot,
        weight_bytes: int,
        segments: int,
        seconds: float,
        ring_bytes: int,
        peak_plaintext_bytes: int,
    ) -> None:
        self._demand(mint, MINT)
        self._model: Decoder | None = model
        self._slot = slot
        self.weight_bytes = weight_bytes
        self.segments = segments
        self.seconds = seconds
        self.ring_bytes = ring_bytes
        self.peak_plaintext_bytes = peak_plaintext_bytes

    @property
    def model(self) -> Decoder:
        """The network whose tensors the load filled.

        Raises:
            RuntimeError: it was given up for zeroizing.
        """
        if self._model is None:
            raise RuntimeError("the model was zeroized; there is nothing to serve")
        return self._model

    @property
    def slot(self) -> Slot:
        """The device that holds it."""
        return self._slot

    def give_up(self) -> None:
        """End the model's life before its memory is overwritten: any later use raises."""
        self._model = None
