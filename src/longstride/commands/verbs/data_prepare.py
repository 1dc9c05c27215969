"""longstride data prepare"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.data.kinds import KindName

ORDER = 40


def main(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    kind: KindName | None = None,
    join: bool = False,
    max_bytes: int | None = None,
) -> None:
    """Turn files into a store that training reads. Example: longstride data prepare enwik8.zip enwik8

    Args:
        source: A file, or a folder of files: text (also compressed), images, sound, or any bytes.
        out: The store's folder.
        kind: The kind of data; by default it follows from names and contents.
        join: Join all files and split them anew, even if some are named train, valid or test.
        max_bytes: The most bytes that the source may unpack to; by default 1 GiB, or 100 times its size if that is more.
    """
    from longstride.data.prepare import prepare

    store = prepare(source, out, kind, max_bytes=max_bytes, join=join)
    sizes = ", ".join(f"{name} {size:,} bytes" for name, size in store.splits.items())
    print(f"{out}: {store.kind}, {sizes}")
