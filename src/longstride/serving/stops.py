"""Stop sequences in a growing text: what may be shown already, and where it ends."""

from collections.abc import Sequence


class Stops:
    """Holds back bytes that may turn out to be the beginning of a stop sequence. The sequence itself is never shown."""

    def __init__(self, sequences: Sequence[bytes]) -> None:
        assert all(sequences)
        self.sequences = tuple(sequences)
        self.held = b""
        self.found = False

    def push(self, new: bytes) -> bytes:
        """Returns the bytes that may be shown after `new` has come; sets `found` if a sequence is complete."""
        if not self.sequences:
            return new
        assert not self.found
        text = self.held + new
        # The sequence that is complete first, as if bytes came one by one; of two, the longer.
        ends = [(at + len(sequence), at) for sequence in self.sequences if (at := text.find(sequence)) >= 0]
        if ends:
            self.found, self.held = True, b""
            return text[: min(ends)[1]]
        keep = max(_overlap(text, sequence) for sequence in self.sequences)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> bytes:
        """Returns what was held back, when nothing more comes."""
        rest, self.held = self.held, b""
        return rest


def _overlap(text: bytes, sequence: bytes) -> int:
    """Returns how many bytes at the end of the text are the beginning of the sequence, but not all of it."""
    most = min(len(text), len(sequence) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(sequence[:size])), 0)
