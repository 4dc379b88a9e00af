"""`pruned_rnnt.load` gives the same texts for every kind of model, and says what is missing."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_USAGE
from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.model_file import ModelFile, load_model
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.model.kernels.available import kernel_report
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import CtcModel, SpeechModel, TransducerModel
from pruned_rnnt.pretrained.found_model import NoModelError, find_model
from pruned_rnnt.system.optional_packages import MissingPackageError
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.batch_input import BatchInput
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.segments import SegmentConfig
from tests.pretrained.saved_models import (
    make_model,
    make_tokenizer,
    save_file,
    save_icefall,
    save_run,
)
from tests.tiny_models import (
    randomise,
    tiny_conformer,
    tiny_model,
    zipformer_of_icefall,
)
from tests.transcribe.random_model import sound

SECONDS = 9.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> SpeechModel:
    return make_model(tokenizer)


def texts(recogniser: pruned_rnnt.transcribe.audio_recogniser.AudioRecogniser) -> list[str]:
    return [result.text for result in recogniser.transcribe([sound(SECONDS), sound(2.0)])]


def test_every_kind_of_model_transcribes_alike(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert isinstance(model, TransducerModel)
    expected = texts(Recogniser(model, tokenizer))
    assert len(expected[0].split()) > 10
    run = save_run(tmp_path / "run", model, tokenizer)
    file = save_file(tmp_path / "file", model, tokenizer)
    icefall = save_icefall(tmp_path / "icefall", model, tokenizer)
    for path in (
        run,
        next((run / "checkpoints").glob("*.pt")),
        file,
        file / "model.pt",
        icefall,
        icefall / "exp/pretrained.pt",
    ):
        recogniser = pruned_rnnt.load(path)
        assert texts(recogniser) == expected, path
        assert recogniser.sampling_rate == 16000
        assert recogniser.tokenizer.symbols == tokenizer.symbols
        assert recogniser.model is not None
        assert not recogniser.model.training


def test_causal_models_of_every_kind_stream_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An imported model, whose file has no chunk sizes, streams with the sizes that are given."""
    model = make_model(tokenizer, zipformer_of_icefall(causal=True))
    finals = []
    for path in (
        save_run(tmp_path / "run", model, tokenizer),
        save_file(tmp_path / "file", model, tokenizer),
        save_icefall(tmp_path / "icefall", model, tokenizer),
    ):
        recogniser = pruned_rnnt.load(path)
        stream = recogniser.stream(chunk=8, left=16)
        for begin in range(0, 16000 * 3, 1600):
            stream.accept_waveform(sound(3.0)[begin : begin + 1600])
            recogniser.step([stream])
        stream.finish()
        while recogniser.step([stream]):
            pass
        finals.append(stream.take_finals())
    assert finals[0][0].words
    assert finals[1] == finals[2] == finals[0]


@pytest.mark.parametrize("ctc_scale", [0.0, 0.2])
def test_segments_and_recordings_are_decoded_together(
    ctc_scale: float, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tiny_conformer(), len(tokenizer), ctc_scale=ctc_scale)
    recordings = [sound(7.0), sound(0.02), np.zeros(16000, np.float32), sound(23.0), sound(3.0)]
    segments = SegmentConfig(window=5.0)
    sizes: list[int] = []

    def recogniser(batch_seconds: float) -> Recogniser:
        made = Recogniser(
            model, tokenizer, segments=segments, decode=DecodeConfig(batch_seconds=batch_seconds)
        )
        search = made._search
        monkeypatch.setattr(made, "_search", lambda x, n: sizes.append(len(x)) or search(x, n))
        return made

    alone = recogniser(0.0).transcribe(recordings)
    assert set(sizes) == {1}
    count = len(sizes)
    sizes.clear()
    together = recogniser(20.0).transcribe(recordings)
    assert sum(sizes) == count
    assert 1 < max(sizes) < count
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.seconds) == (other.text, other.seconds)
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-3)
        assert [word.start for word in one.words] == [word.start for word in other.words]
    assert len(alone[3].text.split()) > 5
    assert not alone[2].text


def test_segments_that_do_not_fit_in_memory_together_are_split(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tokenizer)
    recordings = [sound(seconds) for seconds in (3.0, 4.0, 5.0, 2.0, 3.5)]
    expected = [result.text for result in Recogniser(model, tokenizer).transcribe(recordings)]
    recogniser = Recogniser(model, tokenizer, decode=DecodeConfig(batch_seconds=60.0))
    best_paths = recogniser._best_paths

    def limited(batch: BatchInput, with_heads: bool) -> Any:
        if len(batch.features_NTF) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return best_paths(batch, with_heads)

    monkeypatch.setattr(recogniser, "_best_paths", limited)
    limit = 2
    assert [result.text for result in recogniser.transcribe(recordings)] == expected
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        recogniser.transcribe(recordings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pruned", "ctc"])
def test_onnx_folder_transcribes_alike(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Zipformers: tests/export/test_zipformer_export.py."""
    encoder = tiny_conformer()
    if kind == "ctc":
        torch.manual_seed(0)
        config, loss = ModelConfig(encoder=encoder), LossConfig(kind="ctc")
        model: SpeechModel = CtcModel(config, len(tokenizer), loss).eval()
        randomise(model.ctc_head)
    else:
        model = make_model(tokenizer, encoder)
    export_onnx(ModelFile(model, tokenizer, 2.0), tmp_path, OnnxOptions(), "test")
    recogniser = pruned_rnnt.load(tmp_path)
    assert recogniser.model is None
    assert recogniser.p99_duration == 2.0
    ours = Recogniser(model, tokenizer, 2.0)
    result, expected = (r.transcribe(sound(SECONDS)) for r in (recogniser, ours))
    assert result.text == expected.text
    assert len(result.text.split()) >= 3
    assert result.score == pytest.approx(expected.score, rel=1e-4)
    assert result.words[-1].end > 0.5 * SECONDS  # of the last segment
    assert len(recogniser.transcribe(sound(0.02)).text) >= 0  # shorter than an encoder frame
    with pytest.raises(ValueError, match=r"greedy search only: leave out decode\.method"):
        pruned_rnnt.load(tmp_path, settings=["decode.method=modified_beam"])
    with pytest.raises(ValueError, match="one model, not a run with checkpoints"):
        pruned_rnnt.load(tmp_path, settings=["decode.checkpoint=best"])
    with pytest.raises(ValueError, match=r"device is cuda, but .* has ONNX files"):
        pruned_rnnt.load(tmp_path, "cuda")
    for copied in (copy.deepcopy(recogniser), pickle.loads(pickle.dumps(recogniser))):
        assert copied.transcribe(sound(SECONDS)) == result


@pytest.mark.slow
def test_onnx_files_of_other_exports_and_damaged_ones_are_errors(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    encoder = tiny_conformer(causal=True)
    parts = ModelFile(make_model(tokenizer, encoder), tokenizer)
    export_onnx(parts, whole, OnnxOptions(), "")
    fewer = train_tokenizer(["one"], TokenizerConfig(kind="char"))
    export_onnx(ModelFile(make_model(fewer, encoder), fewer), other, OnnxOptions(), "")
    for name in ("decoder.onnx", "joiner.onnx"):
        kept = (whole / name).read_bytes()
        (whole / name).write_bytes((other / name).read_bytes())
        symbols = f"{name} has {len(fewer)} symbols and the tokens {len(tokenizer)}"
        with pytest.raises(ExportError, match=symbols):
            pruned_rnnt.load(whole)
        (whole / name).write_bytes(kept)
    export_onnx(parts, tmp_path / "stream", OnnxOptions(streaming=True), "")
    kept = (whole / "encoder.onnx").read_bytes()
    (whole / "encoder.onnx").write_bytes((tmp_path / "stream" / "encoder.onnx").read_bytes())
    with pytest.raises(ExportError, match=r"encoder\.onnx has the inputs x, .* needs x, x_lens"):
        pruned_rnnt.load(whole)
    (whole / "encoder.onnx").write_bytes(kept)
    bias = parts.model.joiner.output_linear.bias.detach().numpy().tobytes()
    joiner = (whole / "joiner.onnx").read_bytes()
    assert bias in joiner
    (whole / "joiner.onnx").write_bytes(joiner.replace(bias, b"\xff" * len(bias)))
    with pytest.raises(ValueError, match=r"is nan, .* for ONNX files, export the model again"):
        pruned_rnnt.load(whole).transcribe(sound(SECONDS))
    (whole / "joiner.onnx").write_bytes(joiner)
    recogniser = pruned_rnnt.load(whole)
    run = recogniser._encoder._session.run  # type: ignore[attr-defined]

    def limited(names: None, feeds: dict[str, Any]) -> list[Any]:
        if feeds["x"].shape[1] > 300:
            raise Exception("Failed to allocate memory for requested buffer of size 3\n")
        return run(names, feeds)  # type: ignore[no-any-return]

    session = SimpleNamespace(run=limited)
    monkeypatch.setattr(recogniser._encoder, "_session", session)  # type: ignore[attr-defined]
    first, error, last = recogniser.transcribe_each([sound(2.0), sound(4.0), sound(1.0)])
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(f"{whole / 'encoder.onnx'} fails in onnxruntime: Failed")
    assert not isinstance(first, Exception)
    assert not isinstance(last, Exception)


@pytest.mark.slow
def test_onnx_files_in_the_layout_of_nemo_are_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import onnx

    model = tiny_model(tiny_conformer(), len(tokenizer), durations=(0, 1, 2))
    with torch.no_grad():
        model.joiner.output_linear.bias[3:] = torch.nan
    export_onnx(ModelFile(model, tokenizer), tmp_path, OnnxOptions(), "")
    with pytest.raises(ValueError, match=r"is nan, .* for ONNX files, export the model again"):
        pruned_rnnt.load(tmp_path).transcribe(sound(SECONDS))
    path = tmp_path / "encoder.onnx"
    encoder = onnx.load(path)
    onnx.helper.set_model_props(encoder, {"vocab_size": "many", "pred_rnn_layers": "1"})
    onnx.save(encoder, path)
    with pytest.raises(ExportError, match=r"encoder\.onnx has no pred_hidden in its metadata"):
        pruned_rnnt.load(tmp_path)
    names = ("vocab_size", "pred_rnn_layers", "pred_hidden")
    onnx.helper.set_model_props(encoder, dict.fromkeys(names, "1") | {"vocab_size": "many"})
    onnx.save(encoder, path)
    with pytest.raises(ExportError, match=r"encoder\.onnx has vocab_size='many' in its metadata"):
        pruned_rnnt.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": ["model.encoder.layers=2"]}, r"settings has 'model\.encoder\.layers=2'"),
        ({"settings": [3]}, r"settings has 3, needs decode\.key=value"),
        (
            {"settings": "decode.beam=4"},
            r"settings is 'decode\.beam=4', needs a list such as \['decode\.beam_size=8'\]",
        ),
        ({"settings": None}, "settings is None, needs a list"),
        ({"device": "gpu"}, "device is 'gpu', needs cpu, cuda"),
        ({"device": None}, "device is None, needs cpu, cuda"),
        ({"device": "cuda:99"}, r"device is cuda:99, but torch .* sees (no|\d+) CUDA device"),
        ({"settings": ["decode.batch_seconds=.inf"]}, "batch_seconds is inf, needs a number >= 0"),
        ({"segments": {"window": 3}}, r"segments is \{'window': 3\}, needs a SegmentConfig"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any],
    message: str,
    model: SpeechModel,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        pruned_rnnt.load(save_file(tmp_path, model, tokenizer), **arguments)


def test_a_path_of_another_type_is_named() -> None:
    with pytest.raises(ValueError, match="path is None, needs the path of a run or a model"):
        pruned_rnnt.load(None)  # type: ignore[arg-type]


def test_settings_in_an_error_exist(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = save_file(tmp_path, model, tokenizer)
    with pytest.raises(ValueError, match="needs a list such as") as error:
        pruned_rnnt.load(path, settings="decode.beam_size=8")
    (advice,) = re.findall(r"needs a list such as \['(.*)'\]", str(error.value))
    settings = ["decode.method=modified_beam", advice]
    assert isinstance(pruned_rnnt.load(path, settings=settings), Recogniser)
    with pytest.raises(ValueError, match=r"decode\.beam_size is 8 and decode\.num_best is 9"):
        pruned_rnnt.load(path, settings=[*settings, "decode.num_best=9"])
    for setting in ("decode.checkpoint=best", "decode.use_average=false"):
        with pytest.raises(ValueError, match=f"not a run with checkpoints: leave out {setting}"):
            pruned_rnnt.load(path, settings=[setting])


@pytest.mark.slow
def test_streaming_onnx_folder_transcribes_like_recognise(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The folder's own script runs sherpa-onnx on the same chunks."""
    from pruned_rnnt.export.verify import run_recognise

    encoder = tiny_conformer(causal=True)
    export_onnx(
        ModelFile(make_model(tokenizer, encoder), tokenizer),
        tmp_path,
        OnnxOptions(streaming=True),
        "",
    )
    path = tmp_path / "a.wav"
    soundfile.write(path, sound(SECONDS), 16000)
    recogniser = pruned_rnnt.load(tmp_path)
    words = recogniser.transcribe(path).text.split()
    (theirs,) = run_recognise(tmp_path, [path])
    expected = theirs["text"].split()
    with pytest.raises(ValueError, match="ONNX files cannot transcribe live audio here"):
        recogniser.stream()
    # The noise after the sound differs at its beginning, and the model emits words for it.
    sounding = sum(time < SECONDS - 0.3 for time in theirs["timestamps"])
    assert words[:sounding] == expected[:sounding]
    assert sounding > 10


def test_audio_in_every_form(model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    recogniser = pruned_rnnt.load(save_file(tmp_path, model, tokenizer))
    path = tmp_path / "a.wav"
    samples = sound(2.0)
    soundfile.write(path, samples, 16000, subtype="FLOAT")
    expected = recogniser.transcribe(path)
    assert str(expected) == expected.text != ""
    assert recogniser.transcribe(str(path)) == expected
    assert recogniser.transcribe(samples) == expected
    assert recogniser.transcribe(samples.astype(np.float64)) == expected
    assert recogniser.transcribe([path, samples]) == [expected, expected]
    assert recogniser.transcribe((path,)) == [expected]
    assert recogniser.transcribe([]) == []
    slow = resample(samples, 16000, 8000)
    at_8k = recogniser.transcribe(slow, sampling_rate=8000)
    assert at_8k == recogniser.transcribe(resample(slow, 8000, 16000))
    assert at_8k.seconds == expected.seconds
    for wrong, message in (
        (samples[None], r"shape \(1, 32000\), needs \(S,\)"),
        (samples[:0], "audio has no samples"),
        (samples * np.nan, "NaN or infinite"),
        (None, "audio is of type NoneType, needs a path, or an array"),
        ({"array": samples}, "audio is of type dict, needs a path"),
    ):
        with pytest.raises(ValueError, match=message):
            recogniser.transcribe(wrong)
    halves = torch.from_numpy(samples).bfloat16()
    assert recogniser.transcribe(halves) == recogniser.transcribe(halves.float())
    with pytest.raises(FileNotFoundError, match="is a folder"):
        recogniser.transcribe(tmp_path)
    with pytest.raises(ValueError, match="needs a list of recordings"):
        next(recogniser.transcribe_each(str(path)))


def test_features_are_checked(model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    recogniser = pruned_rnnt.load(save_file(tmp_path, model, tokenizer))
    features_TF = audio_features(sound(2.0))
    expected = recogniser.transcribe_features(features_TF)
    assert expected.text
    assert recogniser.transcribe_features(features_TF.double()) == expected
    assert recogniser.transcribe_features(features_TF.numpy()) == expected
    for shape in ((16000,), (1, 200, 80), ()):
        with pytest.raises(ValueError, match=r"features_TF has the shape .*, needs \(T, 80\)"):
            recogniser.transcribe_features(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"holds features, \(T, 80\) of floats, but got"):
        recogniser.transcribe_features(torch.zeros(200, 40))
    features_TF[5, 5] = math.nan
    with pytest.raises(ValueError, match="the features have NaN or infinite values"):
        recogniser.transcribe_features(features_TF)


@pytest.mark.slow
def test_settings_and_segments_are_used(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run = save_run(tmp_path / "run", model, tokenizer)
    phrases = tmp_path / "phrases.txt"
    phrases.write_text("five two four :30\n")
    settings = ["decode.method=modified_beam", f"decode.fusion.hotwords={phrases}"]
    for path in (run, save_file(tmp_path / "file", model, tokenizer)):
        assert "five two four" not in texts(pruned_rnnt.load(path))[0]
        assert "five two four" in texts(pruned_rnnt.load(path, settings=settings))[0]
    segments = SegmentConfig(window=2.0)
    cut = pruned_rnnt.load(run, segments=segments).transcribe(sound(SECONDS))
    assert cut == Recogniser(model, tokenizer, segments=segments).transcribe(sound(SECONDS))


def test_tensors_are_read_when_a_model_is_loaded(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`find_model` only looks what a file is; loading checks and reads it once."""
    path = save_file(tmp_path / "file", model, tokenizer) / "model.pt"
    checked: list[str] = []
    test = zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: checked.append("") or test(self))
    plain: list[bool] = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: plain.append(k.get("mmap", False)) or load(*a, **k)
    )
    assert find_model(path).kind == "file"
    assert (len(checked), plain) == (0, [])
    pruned_rnnt.load(path)
    assert (len(checked), plain) == (1, [True])


def test_a_cpu_loads_matrices_as_it_multiplies_them(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each is copied once, into the memory order that the recogniser wants."""
    path = save_file(tmp_path / "file", model, tokenizer) / "model.pt"
    loaded = load_model(path, transposed=True).model
    assert isinstance(loaded, SpeechModel)
    places = {name: value.data_ptr() for name, value in loaded.named_parameters()}
    Recogniser(loaded, tokenizer)
    for (name, value), wanted in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value, wanted)
        assert value.data_ptr() == places[name]
        if name.startswith("encoder.") and value.dim() == 2:
            assert value.t().is_contiguous()
    assert any(value.dim() == 2 for value in loaded.encoder.parameters())


def test_fused_kernels_are_chosen(model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = save_file(tmp_path / "file", model, tokenizer)
    off = "fused encoder kernels: off"
    pruned_rnnt.load(path, settings=["decode.fused_kernels=off"])
    assert kernel_report(torch.device("cuda")) == off
    pruned_rnnt.load(path)
    assert kernel_report(torch.device("cuda")) != off


def test_folders_without_a_model_are_named(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(NoModelError, match=r"no model in .*folder, which has no files\. Needed"):
        find_model(folder)
    for name in ("a.txt", "encoder-epoch-9.onnx", ".hidden"):
        (folder / name).touch()
    with pytest.raises(NoModelError, match=r"which has a\.txt, encoder-epoch-9\.onnx\. Needed: co"):
        find_model(folder)
    with pytest.raises(NoModelError, match=r"a\.txt is not a model file"):
        find_model(folder / "a.txt")
    with pytest.raises(NoModelError, match="does not exist"):
        find_model(folder / "b")
    (folder / "epoch-9.pt").touch()
    with pytest.raises(NoModelError, match=r"no bpe\.model or tokens\.txt beside this icefall"):
        find_model(folder)
    (folder / "tokens.txt").touch()
    assert find_model(folder).tokens == folder / "tokens.txt"
    (folder / "epoch-10.pt").touch()
    with pytest.raises(NoModelError, match=r"several .* \(epoch-10\.pt, epoch-9\.pt\): pass"):
        find_model(folder)
    lost = save_run(tmp_path / "run", model, tokenizer) / "checkpoints/step-00000007.pt"
    lost.rename(tmp_path / "lost.pt")
    with pytest.raises(NoModelError, match="not in the folder of its run"):
        find_model(tmp_path / "lost.pt")
    (tmp_path / "other.pt").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"other\.pt is damaged or not a model file"):
        pruned_rnnt.load(tmp_path / "other.pt")


def test_incomplete_onnx_folder_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "encoder.onnx").write_bytes(b"nothing")
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(ExportError, match="is not a complete ONNX export"):
        pruned_rnnt.load(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "settings.json").write_text(
        '{"kind": "transducer", "streaming": false, "shortest_seconds": 0.1}'
    )
    with pytest.raises(ExportError, match=r"encoder\.onnx cannot be loaded"):
        pruned_rnnt.load(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError, match=r"onnxruntime is not .*\[export\]"):
        pruned_rnnt.load(tmp_path)


def test_command_line_takes_an_icefall_folder(
    model: SpeechModel, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "a.wav", sound(2.0), 16000)
    folder = save_icefall(tmp_path / "icefall", model, tokenizer)
    assert main(["transcribe", str(folder), str(tmp_path / "a.wav")]) == 0
    text = pruned_rnnt.load(folder).transcribe(tmp_path / "a.wav").text
    assert capsys.readouterr().out == f"{tmp_path / 'a.wav'}\t{text}\n"
    assert main(["transcribe", str(tmp_path), str(tmp_path / "a.wav")]) == EXIT_USAGE
    assert "which has a.wav, icefall. Needed" in capsys.readouterr().err
