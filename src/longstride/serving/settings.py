"""ServeSettings: every flag of `longstride serve`. Imported without torch and FastAPI."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longstride.common.checks import whole_number
from longstride.common.files import read_text
from longstride.data.kinds import KindName

OWNER = "serve"
KEY_VARIABLE = "LONGSTRIDE_API_KEY"
LONGEST_KEY = 4096
Overflow = Literal["refuse", "slide"]


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine alone; 0.0.0.0 is every network it is on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: Path | None = None
    """File with the key that clients must send. The environment variable LONGSTRIDE_API_KEY has the key itself."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of this server that clients may use, beside localhost and addresses: other names in the Host header are refused,
    so that no web site can reach the server by a name of its own."""
    name: str | None = None
    """What clients call the model. Left out: the name of its card, or of its folder."""
    streams: int | None = None
    """Samples made at once. Left out: 64, or as many as a quarter of the memory is for, on a CPU at most 1 GiB."""
    queue: int = 256
    """Samples that may wait; a request beyond is answered with 429."""
    overflow: Overflow = "refuse"
    """What happens to prompts and answers beyond the context, unless a request says it: refuse them with 400, or slide the
    window, so that earlier bytes are forgotten."""
    exact: bool = False
    """On a GPU, always use the kernels of a full batch, and read each prompt alone: an answer is then the same whoever else
    is served, bit for bit, and clients wait longer. On a CPU it always is."""
    grace: int | None = None
    """Seconds that answers under way get after SIGTERM; left out: as many as they take."""
    kind: KindName | None = None
    """What the bytes are, if the run or the model does not say."""
    checkpoint: str | None = None
    """A checkpoint of the run, such as step-1000, instead of its best weights."""
    device: str = "auto"
    """Auto is the GPU if there is one."""

    def check(self) -> None:
        """Raises ValueError for values that no model accepts."""
        if whole_number(OWNER, "port", self.port, 0) > 65_535:
            raise ValueError(f"{OWNER}: port must be at most 65535, got {self.port}")
        if self.streams is not None:
            whole_number(OWNER, "streams", self.streams, 1)
        whole_number(OWNER, "queue", self.queue, 0)
        if self.grace is not None:
            whole_number(OWNER, "grace", self.grace, 0)
        if self.overflow not in ("refuse", "slide"):
            raise ValueError(f"{OWNER}: overflow must be refuse or slide, got {self.overflow!r}")
        self.api_key()

    def api_key(self) -> str | None:
        """The key that clients must send; None if there is none."""
        if self.api_key_file is not None:
            place = f"api_key_file = {str(self.api_key_file)!r}"
            try:
                key = read_text(self.api_key_file, LONGEST_KEY).strip()
            except OSError as error:
                raise ValueError(f"{OWNER}: {place} cannot be read: {error.strerror}; give a file with a key") from None
        elif KEY_VARIABLE in os.environ:
            key, place = os.environ[KEY_VARIABLE].strip(), f"the environment variable {KEY_VARIABLE}"
        else:
            return None
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{OWNER}: {place} must hold a key: letters, digits and signs on one line")
        return key

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
