"""The program: `python -m longstride`, and the `longstride` that pip installs."""

from longstride.commands.interrupts import quit_on_interrupt


def main() -> None:
    quit_on_interrupt()
    from longstride.commands.main import main as run

    run()


if __name__ == "__main__":
    main()
