"""``python -m remote_diag``: the command ``rdiag``, for whoever has the package and no folder of programs on the PATH."""

from .cli.entry import main

if __name__ == "__main__":
    main()
