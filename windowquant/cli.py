"""The command `windowquant`. Arguments are checked before anything heavy is imported."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from windowquant.errors import UserError

FRAMES = 96  # of a model that is not in conf/model


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}: see {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, 2 for bad input."""
    from windowquant.harness.command import BAD_INPUT, sentence

    try:
        arguments = _parser().parse_args(argv)
        arguments.action(arguments)
    except BAD_INPUT as error:
        print(sentence(error), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="windowquant", description="Look into the mixed-precision KV cache of a video language model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands.add_parser("explain", help="draw what a method does to a video and a question"))
    _add_sensitivity(commands.add_parser("sensitivity", help="draw the calibrated layer sensitivities of models"))
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Asks a model about a video and draws the score of each window beside the frames, the bit-width of each window "
        "in each layer, and the bytes held. With several questions: one row of scores each."
    )
    parser.add_argument("video", type=Path, help="a video file")
    parser.add_argument("questions", nargs="+", metavar="question")
    parser.add_argument("--model", default="mini_llava_onevision", help="a name in conf/model, a folder, or a hub id")
    parser.add_argument("--method", default="windowquant", help="a name in conf/method (default windowquant)")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the method")
    parser.add_argument(
        "--frames", type=int, help=f"frames that the model is shown (default: conf/model's, else {FRAMES})"
    )
    parser.add_argument("--protocol", default="context", help="context (default), cached or paper")
    parser.add_argument(
        "--output", type=Path, default=Path("explain.png"), help=".png (default explain.png), .svg or .pdf"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of the answer (default 32)")
    parser.add_argument("--json", action="store_true", help="write the numbers beside the picture, too")
    parser.set_defaults(action=_explain)


def _add_sensitivity(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draws s_l of every layer from the calibration files of models (paper, Figure 8)."
    parser.add_argument("models", nargs="*", help="names in conf/model, or folders (default: the embedded models)")
    parser.add_argument("--output", type=Path, default=Path("sensitivity.png"), help=".png, .svg or .pdf")
    parser.set_defaults(action=_sensitivity)


def _explain(arguments: argparse.Namespace) -> None:
    from windowquant.harness.command import composed

    if not arguments.video.is_file():
        raise UserError(f"Video {arguments.video} does not exist: give the path of a video file.")
    if not all(question.strip() for question in arguments.questions):
        raise UserError("A question is empty: put it into quotes after the video.")
    _check_output(arguments.output)
    checkpoint = arguments.model if "/" in arguments.model or Path(arguments.model).is_dir() else None
    words = [] if checkpoint else [f"model={arguments.model}"]
    words += [f"method={arguments.method}", f"protocol={arguments.protocol}", f"device={arguments.device}"]
    words += [f"method.{option}" for option in arguments.set]
    words += [f"task.max_new_tokens={arguments.max_new_tokens}", "wandb.mode=disabled"]
    frames = arguments.frames if arguments.frames is not None or not checkpoint else FRAMES
    words += [] if frames is None else [f"model.frames={frames}"]
    cfg = composed("run", words)

    from windowquant.explain.command import explain_command

    explain_command(cfg, checkpoint, arguments.video, arguments.questions, arguments.output, arguments.json)


def _sensitivity(arguments: argparse.Namespace) -> None:
    _check_output(arguments.output)

    from windowquant.report.sensitivity import sensitivity_command

    sensitivity_command(arguments.models, arguments.output)


def _check_output(path: Path) -> None:
    from windowquant.report.save import figure_format

    figure_format(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: name a file in a folder that can.")


if __name__ == "__main__":
    sys.exit(main())
