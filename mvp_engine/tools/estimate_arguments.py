"""Options of `mvp estimate` and `mvp plan`."""

from __future__ import annotations

import argparse

from mvp_engine.tools.command_parsers import add_overrides


def add_estimate_options(command: argparse.ArgumentParser) -> None:
    _add_options(command)
    text = "simulate a rank, as mvp plan does, for the communication that a step waits for"
    command.add_argument("--communication", action="store_true", help=text)


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        metavar="CONFIG|MODEL",
        help="a YAML file, a shipped config such as sft/lora, a model folder or a Hub id",
    )
    add_overrides(command)
    text = "such as H100 or 'RTX 4090' (default: the GPU of this machine, else H200)"
    command.add_argument("--gpu", metavar="NAME", help=text)
    text = "number of GPUs (default: as many as the parallel layout needs)"
    command.add_argument("--gpus", type=int, metavar="N", help=text)
    text = "assume full packs of N tokens instead of reading data (default for a MODEL: 8192)"
    command.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "share of image or audio tokens in assumed packs (default: 0.75)"
    command.add_argument("--media-share", type=float, default=0.75, metavar="X", help=text)
    text = "GPUs that NVLink or PCIe connects (default: 8)"
    command.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help=text)
    text = "network between nodes, in GB/s per GPU and direction (default: 50, 400 Gb/s)"
    command.add_argument("--network", type=float, metavar="X", help=text)


def add_plan_options(command: argparse.ArgumentParser) -> None:
    _add_options(command)
    text = "more ranks to simulate: numbers with commas, or all (default: one of each kind)"
    command.add_argument("--ranks", metavar="N,N", help=text)
