"""``python -m bigtrain``: the same as the command `bigtrain`."""

from bigtrain.cli import program

if __name__ == "__main__":
    program()
