"""The parser of MLC-LLM's command line."""

import argparse


class ArgumentParser(argparse.ArgumentParser):
    pass
