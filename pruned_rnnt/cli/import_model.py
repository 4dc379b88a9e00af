"""`pruned-rnnt import`, `import-icefall`: a run from a model of NeMo, transformers or icefall."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pruned_rnnt.cli.command import (
    Parsers,
    add_command,
)
from pruned_rnnt.system.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from pruned_rnnt.licences.chain import Licence


_HELP = """\
SOURCE is a .nemo archive or a folder of transformers with a Parakeet model (FastConformer with
RNN-T, TDT or CTC outputs), a checkpoint of icefall's Zipformer transducer recipe, or owner/name of
a repository of the Hugging Face hub with one of these. No code in the files runs. Audio and
prepared data then work as for a run that was trained here.
  pruned-rnnt import parakeet-tdt-0.6b.nemo exp/parakeet
  pruned-rnnt import epoch-30.pt exp/icefall --tokens data/lang_bpe_500/bpe.model
  pruned-rnnt transcribe exp/parakeet a.wav
The CTC head of a hybrid model is kept; loss.ctc_scale=0 leaves it out. Settings of icefall's model
that cannot be read from its parameters are model.encoder.key=value.
"""
_ICEFALL_HELP = """\
CHECKPOINT is pretrained.pt or epoch-N.pt of icefall's Zipformer transducer recipe; the averaged
model is used if the file has one. --tokens is the recipe's bpe.model, or tokens.txt if bpe.model
is not available. Settings that cannot be read from the parameters are model.encoder.key=value.
  pruned-rnnt import-icefall epoch-30.pt --tokens data/lang_bpe_500/bpe.model --output exp/icefall
  pruned-rnnt transcribe exp/icefall a.wav
`pruned-rnnt import epoch-30.pt exp/icefall` does the same, and reads models of NeMo too.
"""


def add(parsers: Parsers[argparse.ArgumentParser]) -> None:
    from pruned_rnnt.licences.arguments import add_licence_arguments

    parser = add_command(parsers, import_model, _HELP, name="import")
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="archive, folder, checkpoint or owner/name"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="new run folder")
    _add_icefall_arguments(parser, "icefall: bpe.model or tokens.txt, if they are not near SOURCE")
    add_licence_arguments(parser, "the weights")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")

    parser = add_command(parsers, import_icefall, _ICEFALL_HELP)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file to import")
    _add_icefall_arguments(parser, "bpe.model or tokens.txt (required)")
    parser.add_argument("--output", type=Path, required=True, metavar="RUN", help="new run folder")
    add_licence_arguments(parser, "the weights")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")


def _add_icefall_arguments(parser: argparse.ArgumentParser, tokens: str) -> None:
    """The options for checkpoints of icefall, which both import commands have."""
    parser.add_argument("--tokens", type=Path, metavar="FILE", help=tokens)
    parser.add_argument(
        "--since",
        type=Path,
        metavar="FILE",
        help="icefall: average only the steps after this earlier checkpoint",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="icefall: allow the file to run code when it is loaded, as pickle files can",
    )


def import_model(options: argparse.Namespace, console: Console) -> int:
    """Make a run from a model of NeMo, transformers or icefall."""
    from dataclasses import replace

    from pruned_rnnt.licences.arguments import licence_of
    from pruned_rnnt.licences.chain import Licence, add_origins, chain_of_weights
    from pruned_rnnt.pretrained.found_model import find_model
    from pruned_rnnt.pretrained.hub import local_path, source_name
    from pruned_rnnt.train.run import check_is_new

    check_is_new(options.run)
    licence = licence_of(options)
    path = local_path(options.source)
    found = find_model(path, options.tokens)
    if found.kind == "nemo":
        if options.tokens or options.since or options.trust:
            raise UsageError(
                f"--tokens, --since and --trust are for checkpoints of icefall, but {found.path} "
                "is a model of NeMo or transformers: leave them out"
            )
        lines = _import_nemo(found.path, options.run, options.overrides)
        weights = found.path if found.path.is_file() else found.path / "model.safetensors"
    elif found.kind == "icefall":
        options.checkpoint, options.tokens, options.output = found.path, found.tokens, options.run
        lines = _import_icefall_run(options)
        weights = found.path
    else:
        raise UsageError(
            f"{found.path} is a model of this package, which the commands read as it is: import is "
            "for .nemo archives, folders of transformers and checkpoints of icefall"
        )
    source = source_name(options.source, path)
    stated: Licence | None = None
    if licence != Licence():
        stated = replace(licence, source=licence.source or source)
    add_origins(options.run, chain_of_weights(weights, stated, source))
    print("\n".join(lines))
    return 0


def import_icefall(options: argparse.Namespace, console: Console) -> int:
    """Make a run from a model that icefall's Zipformer recipe trained."""
    from pruned_rnnt.licences.arguments import licence_of
    from pruned_rnnt.licences.chain import Licence, add_origins, chain_of_weights
    from pruned_rnnt.train.run import check_is_new

    if options.tokens is None:
        raise UsageError("import-icefall needs --tokens FILE, the recipe's bpe.model or tokens.txt")
    check_is_new(options.output)
    licence = licence_of(options)
    lines = _import_icefall_run(options)
    stated = licence if licence != Licence() else None
    add_origins(options.output, chain_of_weights(options.checkpoint, stated))
    print("\n".join(lines))
    return 0


def _import_nemo(source: Path, output: Path, overrides: Sequence[str]) -> list[str]:
    """Write the run; returns lines about it."""
    from pruned_rnnt.interop.nemo.imported_model import describe, read_run
    from pruned_rnnt.train.run import save_run

    run = read_run(source, output, overrides)
    save_run(run.model, run.tokenizer, run.config, output)
    return describe(run)


def _import_icefall_run(options: argparse.Namespace) -> list[str]:
    """Write the run of options.checkpoint; returns lines about it."""
    from pruned_rnnt.interop.icefall_run import describe, read_run
    from pruned_rnnt.train.run import save_run

    run = read_run(
        options.checkpoint,
        options.tokens,
        options.output,
        since=options.since,
        trust=options.trust,
        overrides=options.overrides,
    )
    save_run(run.model, run.tokenizer, run.config, options.output)
    return describe(run)
