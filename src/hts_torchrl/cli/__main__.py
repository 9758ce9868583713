"""``python -m hts_torchrl.cli`` is ``hts-torchrl``."""

from hts_torchrl.cli import program

if __name__ == "__main__":
    program()
