"""`pruned-rnnt export`: check the options, write the folder, verify it."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from pathlib import Path

from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.precision import QUANTISED, QuantisedPrecision
from pruned_rnnt.export.torch_folder import export_torch
from pruned_rnnt.export.verify import verify
from pruned_rnnt.interop.icefall.zipformer_export import export_icefall
from pruned_rnnt.interop.nemo.exported_model import export_model
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.system.optional_packages import ONNX_PACKAGES, VERIFY_PACKAGES, require
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.system.whole_files import appearing_together


def check_export(options: argparse.Namespace) -> None:
    """Check the options before the model is loaded.

    Raises:
        UsageError: options exclude each other, or an audio file does not exist.
        MissingPackageError: a package of the `export` extra is not installed.
    """
    precisions = chosen_precisions(options)
    if options.format != "onnx" and (precisions or options.fp16 or options.verify):
        raise UsageError("--int8, --precision, --fp16 and --verify need --format onnx")
    if options.calibrate is None and (options.measure or options.max_wer_increase is not None):
        raise UsageError("--measure and --max-wer-increase need --calibrate DATA/SPLIT")
    if options.calibrate is not None and not precisions:
        raise UsageError("--calibrate needs --precision int8 or int4")
    increase = options.max_wer_increase
    if increase is not None and not 0 <= increase < math.inf:
        raise UsageError(f"--max-wer-increase is {increase}, needs a percentage of at least 0")
    if options.format == "onnx":
        require(*ONNX_PACKAGES, *(VERIFY_PACKAGES if options.verify else ()))
    for path in options.verify or ():
        if not path.is_file():
            raise UsageError(f"audio file not found: {path}")


def chosen_precisions(options: argparse.Namespace) -> tuple[QuantisedPrecision, ...]:
    """The quantised precisions that the options name."""
    named = {*options.precision, *(["int8"] if options.int8 else [])}
    return tuple(name for name in QUANTISED if name in named)


def run_export(
    options: argparse.Namespace,
    parts: ModelFile,
    folder: Path,
    source: str,
    decode: DecodeConfig,
    *,
    check_quantised: Callable[[Path], None] | None = None,
) -> bool:
    """Write the folder and verify it if requested; False if the exported model differs.

    Args:
        source: name of the run and checkpoint, for README and metadata.
        check_quantised: measures and repairs the quantised files in a folder before they appear;
            an error leaves an earlier export as it was.
    """
    # The exporters log remarks about operators that our models do not have.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parts = parts._replace(model=parts.model.cpu().eval())
    model, tokenizer, *_ = parts
    precisions = chosen_precisions(options)
    sizes = OnnxOptions(
        streaming=options.streaming,
        chunk=options.chunk,
        left=options.left,
        int8="int8" in precisions,
        int4="int4" in precisions,
        fp16=options.fp16,
    )
    if options.format == "torch":
        export_torch(parts, folder, sizes, source)
        print(f'wrote {folder}; to use it: pruned_rnnt.load("{folder}").transcribe("a.wav")')
        return True
    if options.format == "icefall":
        export_icefall(as_transducer(model, "--format icefall"), tokenizer, folder)
        print(f"wrote {folder}; for icefall's scripts: --checkpoint {folder}/pretrained.pt")
        return True
    if options.format == "nemo":
        archive = folder / "model.nemo"
        folder.mkdir(parents=True, exist_ok=True)
        archive.unlink(missing_ok=True)
        export_model(model, tokenizer, archive)
        print(f"wrote {archive}")
        return True
    with appearing_together(folder, replacing=["*.onnx"]) as unfinished:
        graphs = export_onnx(parts, unfinished, sizes, source, decode)
        if check_quantised is not None:
            check_quantised(unfinished)
        elif precisions:
            print(
                f"{', '.join(precisions)}: nothing was measured: the error rate of these files is "
                "unknown; --calibrate DATA/SPLIT measures it"
            )
    print(f"wrote {folder}; to use it: python {folder / 'recognise.py'} a.wav")
    for line in differences(model, decode, streaming=options.streaming):
        print(f"may decode differently: {line}")
    exact = True
    if options.verify:
        for result in verify(model, tokenizer, graphs, folder, options.verify):
            print("\n".join(result.lines()))
            # Other precisions round differently: their differences are printed, but are no failure.
            exact = exact and (result.exact or result.precision != "fp32")
        print("verified" if exact else "NOT VERIFIED: the exported model differs, see above")
    return exact
