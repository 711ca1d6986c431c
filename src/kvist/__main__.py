"""``python -m kvist``: the same as ``kvist``, where no command of that name is on the path."""

from kvist.cli.main import main

if __name__ == "__main__":
    main()
