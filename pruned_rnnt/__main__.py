"""`python -m pruned_rnnt` runs the command line, like `pruned-rnnt`."""

from pruned_rnnt.cli import run

if __name__ == "__main__":
    run()
