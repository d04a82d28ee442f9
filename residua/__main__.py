"""`python -m residua` is `residua`."""

from residua.cli.main import main

if __name__ == "__main__":
    main()
