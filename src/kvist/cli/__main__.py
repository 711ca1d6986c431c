"""``python -m kvist.cli``: the same as ``kvist``."""

from kvist.cli.main import main

if __name__ == "__main__":
    main()
