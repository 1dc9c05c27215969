"""longstride completion"""

from typing import Annotated, Literal

import tyro

ORDER = 160
Shell = Literal["bash", "zsh", "fish"]


def main(shell: Annotated[Shell, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]) -> None:
    """Print a script for completion by Tab in bash, zsh or fish. Example: longstride completion bash

    Args:
        shell: bash, zsh or fish. To try it: source <(longstride completion bash). To keep it, write the script to
            ~/.local/share/bash-completion/completions/longstride for bash, to _longstride in a folder of $fpath for zsh, and
            to ~/.config/fish/completions/longstride.fish for fish.
    """
    from longstride.commands.completion import completion_script

    print(completion_script(shell), end="")
