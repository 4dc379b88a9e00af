"""What `pruned-rnnt export` and `pruned-rnnt transcribe` do, once the model is loaded."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import BinaryIO

from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.decode.search import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.extras import ONNX_PACKAGES, VERIFY_PACKAGES, ExportError, require
from pruned_rnnt.export.live import LiveRecogniser, transcribe_raw
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.recogniser import Recogniser
from pruned_rnnt.export.torch_folder import export_torch
from pruned_rnnt.export.verify import verify
from pruned_rnnt.model.transducer import TransducerModel


def check_export(options: argparse.Namespace) -> None:
    """Refuse what cannot be done before the model is loaded.

    Raises:
        ExportError: options that do not go together, or a missing package.
    """
    if options.format == "torch" and (options.int8 or options.fp16 or options.verify):
        raise ExportError("--int8, --fp16 and --verify are for --format onnx")
    if options.format == "onnx":
        require((*ONNX_PACKAGES, *(VERIFY_PACKAGES if options.verify else ())))
    for path in options.verify or ():
        if not path.is_file():
            raise ExportError(f"audio file not found: {path}")


def run_export(
    options: argparse.Namespace,
    model: TransducerModel,
    tokenizer: Tokenizer,
    folder: Path,
    source: str,
    decode: DecodeConfig,
) -> bool:
    """Write the folder, print what was written and verified; False where verifying failed."""
    # The exporters' remarks are about operators that no model here has.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = model.cpu().eval()
    sizes = OnnxOptions(
        streaming=options.streaming,
        chunk=options.chunk,
        left=options.left,
        int8=options.int8,
        fp16=options.fp16,
    )
    if options.format == "torch":
        export_torch(model, tokenizer, folder, sizes, source)
        print(f'wrote {folder}; use it with pruned_rnnt.load("{folder}").transcribe("a.wav")')
        return True
    graphs = export_onnx(model, tokenizer, folder, sizes, source, decode)
    print(f"wrote {folder}; use it with: python {folder / 'recognise.py'} a.wav")
    for line in differences(model, decode):
        print(f"differs: {line}")
    exact = True
    if options.verify:
        for result in verify(model, tokenizer, graphs, folder, options.verify):
            print("\n".join(result.lines()))
            # Smaller numbers round differently: their differences are listed, and no failure.
            exact = exact and (result.exact or result.precision != "fp32")
        print("verified" if exact else "NOT VERIFIED: the exported model differs, see above")
    return exact


def print_live(model: TransducerModel, tokenizer: Tokenizer, source: BinaryIO) -> None:
    """The text of raw audio as it comes."""
    for text in transcribe_raw(LiveRecogniser(model, tokenizer), source):
        print(text, end="", flush=True)
    print()


def print_transcriptions(recogniser: Recogniser, paths: list[Path], times: bool) -> None:
    """One line a file, and with `times` one more a word."""
    for path in paths:
        heard = recogniser.transcribe(path)
        print(f"{path}\t{heard.text}", flush=True)
        for word in heard.words if times else ():
            print(f"{word.start:9.2f}{word.end:9.2f}  {word.word}")
