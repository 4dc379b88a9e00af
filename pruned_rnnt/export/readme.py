"""How to use an exported folder: the part of its README that depends on the format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.search.tdt_greedy import SHERPA_MAX_SYMBOLS
from pruned_rnnt.export.differences import SHERPA_MAX_NEMO_SYMBOLS
from pruned_rnnt.export.onnx_folder import SETTINGS_NAME
from pruned_rnnt.export.precision import QUANTISED

HERE = "."
_TITLES = {
    "ctc": "CTC",
    "nemo_ctc": "CTC",
    "tdt": "TDT",
    "transducer": "transducer",
    "nemo": "RNN-T",
}
_TORCH = """\
## Use

```bash
pip install 'pruned_rnnt[train]'
```

```python
import pruned_rnnt

recogniser = pruned_rnnt.load("{load_name}")
print(recogniser.transcribe("a.wav").text)
```

`pruned-rnnt transcribe {load_name} a.wav` does the same on the command line, and `pruned-rnnt
finetune {load_name} DATA` trains the model further. The `.pt2` files are for `torch.export.load`
and run without pruned_rnnt.
"""

_TORCH_STREAMING = """
## Streaming

`recogniser.stream()`, `pruned-rnnt transcribe {load_name} -` and the `.pt2` files take chunks of
{chunk} encoder frames with {left} frames of left context; `recogniser.transcribe` decodes files in
such chunks, too. The settings `decode.chunk` and `decode.left` choose others, but not for the
`.pt2` files: `pruned_rnnt.load("{load_name}", settings=["decode.chunk=16", "decode.left=64"])`.
"""

_ICEFALL = """\
## Use

`pretrained.pt`, `bpe.model` and `tokens.txt` are for the scripts of icefall's Zipformer recipe
(`--checkpoint pretrained.pt`).
"""

_ICEFALL_LOAD = """\
`pruned_rnnt.load("{load_name}").transcribe("a.wav")` loads them, too.
"""

_ICEFALL_SETTINGS = """
The files do not hold these settings of the model, without which `pruned_rnnt.load` refuses the
files or may give wrong texts. Give them to the import, and load the run that it writes:

    pruned-rnnt import pretrained.pt RUN --tokens bpe.model {settings}
"""

_NEMO = """\
## Use

NeMo restores `model.nemo` with `ASRModel.restore_from("model.nemo")`. `pruned-rnnt transcribe
model.nemo a.wav` transcribes with it, and `pruned-rnnt finetune model.nemo DATA` trains it further.
Greedy search emits at most `decoding.greedy.max_symbols` symbols in a frame: the
decode.max_symbols_per_frame of the export, 10 if that was 0, and 1 for a model that emits at most
one (loss.rnnt_type).
"""

_SHARED = """\
## Use

Exported {kind} model: {source}. It runs in sherpa-onnx (tested with 2.0.1). In this folder:

    pip install sherpa-onnx soundfile
    python recognise.py a.wav

{load}{method}`--threads 2` uses two threads{other}.
With the programs of a sherpa-onnx build:

    {command}

## Input

- Audio at any sampling rate, at least {shortest_seconds} s long; sherpa-onnx resamples it to
  {sample_rate} Hz. Its filter is not that of `transcribe`: their texts may differ for
  files with another sampling rate.
- Features: {feature_dim} log-mel bins of samples in [-1, 1], 25 ms windows every 10 ms, no dither.
  {features}
"""

_LOAD = """\
`pruned_rnnt.load("{load_name}").transcribe("a.wav")` runs it with onnxruntime, also on long audio,
which it cuts at pauses; `recognise.py` decodes a file as a whole, unless the model streams.

"""

_TRANSDUCER_DECODING = """
## Decoding

The blank is 0, `<unk>` is never emitted, a frame of 40 ms emits at most one symbol, and the context
before the first symbol is [-1, ..., -1, 0], where -1 embeds to zero. `pruned-rnnt decode` does the
same by default (`decode.max_symbols_per_frame=1`, `decode.skip_unknown=true`). One difference
remains in modified beam search: sherpa-onnx adds the probability of `<unk>` to the blank, and
`pruned-rnnt decode` drops it.

The `text` of sherpa-onnx's results has no spaces before most punctuation marks and between Chinese
characters, and has the language tags of models that write them (`<|tr|>`). `recognise.py` joins the
tokens itself, and so gives the text of `pruned-rnnt decode`.
"""

_NEMO_DECODING = """
## Decoding

{durations}sherpa-onnx runs it as a model of NeMo (`model_type` nemo_transducer). At most {most}
symbols are emitted in a frame, and `<unk>` is never emitted, as in `pruned-rnnt decode` with
decode.max_symbols_per_frame={most}. The blank is the last symbol of tokens.txt.

{features}
"""

_DURATIONS = """\
The model skips frames: with each symbol or blank it predicts a duration of up to {longest} frames
of {frame_ms} ms. """

_FEATURES = {
    "fbank": """\
For such models sherpa-onnx uses mel filters (those of librosa) that differ from those of training.
The encoder converts the features, but not exactly: texts may differ from those of
`pruned-rnnt decode`, especially where the audio is very quiet.""",
    "nemo": """\
The features that sherpa-onnx computes for such models are those of NeMo but for the window (Povey's
instead of Hann's), the mel filters, which end at 7.6 instead of 8 kHz, and the centres of the
frames, which are 5 ms later. Texts may differ from those of `pruned-rnnt decode`.""",
    "nemo_ctc": """\
The features that sherpa-onnx computes for such models are those of NeMo but for the centres of the
frames, which are 5 ms later. Texts may differ from those of `pruned-rnnt decode`.""",
    "nemo_stream": """\
The features that sherpa-onnx computes for streams of such models are those of NeMo but for the
centres of the frames, which are 5 ms later, and for low energies: those below 2^-23 become 2^-23,
while NeMo adds 2^-24 to all. Texts may differ from those of `pruned-rnnt transcribe`. Use
sherpa-onnx 2.0 or later: earlier versions search otherwise, or compute other features for CTC
models.""",
}

_NEMO_CTC_DECODING = """
## Decoding

sherpa-onnx runs it as a CTC model of NeMo. It takes the most probable symbol of each frame of
{frame_ms} ms, as `pruned-rnnt decode` with `decode.method=ctc_greedy` does, but also emits `<unk>`
(`decode.skip_unknown=false`). The blank is the last symbol of tokens.txt.

{features}
"""

_CTC_DECODING = """
## Decoding

The blank is 0. sherpa-onnx takes the most probable symbol of each frame of 40 ms, as
`pruned-rnnt decode` with `decode.method=ctc_greedy` does, but also emits `<unk>`
(`decode.skip_unknown=false`).
"""

_TIMES = """
## Times

The timestamps of sherpa-onnx say where the model emitted them, in frames of {frame_ms} ms, not
where the symbols were spoken: {delay}. `pruned-rnnt decode` prints the delay of a model if the data
have word times. For times of words use `pruned-rnnt transcribe` with the run, or with an export of
`--format torch`: these use the model's CTC head, and the calibration of the run (`decode
--calibrate`).
"""
_DELAYS = {
    False: "a model that sees all of the audio may emit a word before or after it is spoken",
    True: "a streaming model may emit a word some tenths of a second after it was spoken",
}

_QUANTISED = """
## Quantised files

Files of int8 have weights of eight bits, and matrix products of integers. Those of int4 have
matrices of four-bit weights with a scale for each 32 inputs, which run as products of floats
(MatMulNBits of onnxruntime), and eight bits elsewhere.

{measured}
"""
_NOT_MEASURED = """\
The error rate of {names} was not measured: it may be much higher than that of float32. `pruned-rnnt
export --calibrate DATA/SPLIT` measures it, and keeps it within a bound.
"""

_DIFFERENCES = """
With the settings of this model, sherpa-onnx may decode differently from `pruned-rnnt decode`:

{lines}
"""

_STREAMING = """
## Streaming

A chunk has {chunk_frames} frames ({chunk_seconds} s), and attention sees {left_frames} frames
of left context. The model's configuration has {trained_chunk} and {trained_left}.
A chunk is decoded only when it is full. Append {tail_seconds} s of quiet noise after the last word,
as `recognise.py` and `pruned_rnnt.load` do, or the end may be missing. Do not append digital
silence: the model may emit words for it.

Where audio ends in the middle of speech, the model may take the noise for the end of what was said,
and emit words that were not. `"tail_seconds": 0` in `settings.json` appends nothing; the last words
may then be missing. `pruned_rnnt.load` of the run, or of an export of `--format torch`, needs no
noise.
"""


def use_of_export(
    folder: Path,
    kind: str,
    load_name: str = HERE,
    settings: Sequence[str] = (),
    stream_sizes: tuple[int, int] | None = None,
) -> str:
    """Markdown on how to use the files of an export.

    Args:
        kind: `torch`, `onnx`, `icefall` or `nemo`.
        load_name: what `pruned_rnnt.load` takes; by default the current folder.
        settings: `section.key=value`, which an import of the kind `icefall` needs.
        stream_sizes: encoder frames of a chunk and of its left context, for streams of `torch`.
    """
    if kind == "onnx":
        return onnx_use(json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8")), load_name)
    formats = {"torch": _TORCH, "icefall": _ICEFALL, "nemo": _NEMO}
    formats["icefall"] += _ICEFALL_SETTINGS if settings else _ICEFALL_LOAD
    chunk, left = stream_sizes or (0, 0)
    if stream_sizes is not None:
        formats["torch"] += _TORCH_STREAMING
    return formats[kind].format(
        load_name=load_name, settings=" ".join(settings), chunk=chunk, left=left
    )


def onnx_use(settings: Mapping[str, Any], load_name: str = HERE) -> str:
    """Of a folder of `--format onnx`, from its settings."""
    program = "sherpa-onnx" if settings["streaming"] else "sherpa-onnx-offline"
    others = [name for name in settings["precisions"] if name != "fp32"]
    is_ctc = settings["kind"] in ("ctc", "nemo_ctc")
    is_nemo = settings["kind"] in ("tdt", "nemo", "nemo_ctc")
    model = "--encoder=encoder.onnx --decoder=decoder.onnx --joiner=joiner.onnx"
    if is_nemo:
        model += " --model-type=nemo_transducer"
    if is_ctc:
        option = "zipformer2-ctc-model" if settings["streaming"] else "zipformer-ctc-model"
        if is_nemo:
            option = "nemo-ctc-model"
        model = f"--{option}=model.onnx"
    text = _SHARED.format(
        load=_LOAD.format(load_name=load_name),
        source=settings["source"],
        kind=_TITLES[settings["kind"]],
        method="" if is_ctc or is_nemo else "`--method modified_beam_search` uses beam search, ",
        other="".join(f", `--precision {name}` uses the {name} files" for name in others),
        command=" \\\n      ".join([f"{program} --tokens=tokens.txt", model, "a.wav"]),
        sample_rate=settings["sample_rate"],
        feature_dim=settings["feature_dim"],
        shortest_seconds=settings["shortest_seconds"],
        features="sherpa-onnx computes them by itself (see below)."
        if is_nemo
        else "These are sherpa-onnx's defaults.",
    )
    frame_ms = settings.get("frame_ms", 40)
    features = settings.get("features", "fbank")
    if is_nemo and settings["streaming"]:
        features = "nemo_stream"
    elif is_nemo and is_ctc:
        features = "nemo_ctc"
    if is_nemo and is_ctc:
        text += _NEMO_CTC_DECODING.format(frame_ms=frame_ms, features=_FEATURES[features])
    elif is_nemo:
        is_tdt = settings["kind"] == "tdt"
        text += _NEMO_DECODING.format(
            durations=_DURATIONS.format(longest=settings["longest_duration"], frame_ms=frame_ms)
            if is_tdt
            else "",
            most=SHERPA_MAX_SYMBOLS if is_tdt else SHERPA_MAX_NEMO_SYMBOLS,
            features=_FEATURES[features],
        )
    else:
        text += _CTC_DECODING if is_ctc else _TRANSDUCER_DECODING
    text += _TIMES.format(delay=_DELAYS[settings["streaming"]], frame_ms=frame_ms)
    if quantised := [name for name in settings["precisions"] if name in QUANTISED]:
        text += _quantised(quantised, settings.get("quantisation", {}))
    if settings["differences"]:
        lines = "\n".join(f"- {line}." for line in settings["differences"])
        text += _DIFFERENCES.format(lines=lines)
    if settings["streaming"]:
        chunk, left = settings["trained_frames"]
        text += _STREAMING.format(**settings, trained_chunk=chunk, trained_left=left)
    return text


def _quantised(names: Sequence[str], results: Mapping[str, Any]) -> str:
    """The section on quantised files; results: as `quantise.contract` writes them, by precision."""
    parts = []
    if results:
        lines = [
            "| files | size of fp32 | measured on | counted | errors | fp32 | difference "
            "| 95% interval | bound | layers in fp32 |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, each in results.items():
            cells = (
                name,
                f"1/{each['fp32_bytes'] / each['bytes']:.2f}",
                each["measured_on"],
                f"{each['words']:,} {each.get('unit', 'words')}",
                f"{each['errors']:,} ({each['errors'] / each['words']:.2%})",
                f"{each['fp32_errors']:,} ({each['fp32_errors'] / each['words']:.2%})",
                f"{100 * each['difference']:+.2f} points",
                f"{100 * each['lower']:+.2f} to {100 * each['upper']:+.2f}",
                f"{each['increase']:.1%} more errors",
                f"{len(each['kept'])} of {each['layers']}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        parts.append(
            "Measured with onnxruntime and greedy search, on the files of this folder. Intervals "
            "are by paired bootstrap over utterances."
        )
    for name, each in results.items():
        if each["kept"]:
            rows = [
                f"- {layer['graph']} `{layer['name']}`: {layer['error']:.2%}"
                for layer in each["kept"]
            ]
            parts.append(
                f"Layers of higher precision in the files of {name} (float32, or in "
                "int4 files eight bits), because they change the output of their graph "
                f"most if they alone are quantised (on {each['calibrated_on']}):\n\n"
                + "\n".join(rows)
            )
    if missing := [name for name in names if name not in results]:
        parts.append(_NOT_MEASURED.format(names=" and ".join(missing)).strip())
    return _QUANTISED.format(measured="\n\n".join(parts))
