"""Entry point of ``python -m shotcast``."""

from shotcast.cli import main

if __name__ == "__main__":
    main()
