"""`python -m ftrun` is `ftrun`."""

from ftrun.cli.main import main

if __name__ == "__main__":
    main()
