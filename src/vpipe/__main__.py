"""``python -m vpipe``: the same command, for launchers such as torchrun and srun."""

from vpipe.cli.main import main

if __name__ == "__main__":
    main()
