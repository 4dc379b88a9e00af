"""Audio and pictures as data URLs, with a limit on their bytes for the whole page."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple
from urllib.parse import quote
from warnings import catch_warnings, filterwarnings

from pruned_rnnt.data.audio.decoder_messages import without_decoder_messages
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.recordings import last_line, may_be_mp3
from pruned_rnnt.data.audio.waveform import resample
from pruned_rnnt.data.input.shar_members import with_shar_audio

# Of libsndfile's scale from 0 (best) to 1: about 45 kbit/s for speech at 16 kHz.
_COMPRESSION = 0.5
# Of the spectrogram and the lattice in a picture.
_DOTS_PER_INCH = 80
# Characters that may stand in a data URL as they are.
_UNQUOTED = "/+=:;,.-_ ()'"


class Clip(NamedTuple):
    """A file in the page: its data URL, or why there is none."""

    url: str
    problem: str = ""


class ByteBudget:
    """Counts the bytes of data URLs that may still be put into the page."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.left_out = 0

    def take(self, clip: Clip) -> Clip:
        """The clip; if it does not fit, an empty clip with the reason."""
        if not clip.url:
            return clip
        if len(clip.url) > self.left:
            self.left_out += 1
            return Clip("", "left out: the page would exceed --megabytes")
        self.left -= len(clip.url)
        return clip


def audio_clip(cut: Any | None) -> Clip:
    """The first channel of a cut as MP3, or as WAV if libsndfile cannot write MP3."""
    if cut is None:
        return Clip("", "no audio: the utterance is not in the data")
    if not cut.has_recording:
        return Clip("", "no audio: the data hold features only")
    try:
        with without_decoder_messages(may_be_mp3(cut)):
            samples_S = with_shar_audio(cut).load_audio()[0]
    except Exception as error:  # readers of audio raise errors of every kind
        return Clip("", f"audio cannot be read: {last_line(error)}")
    rate = int(cut.sampling_rate)
    if rate > SAMPLING_RATE:
        samples_S, rate = resample(samples_S, rate, SAMPLING_RATE), SAMPLING_RATE
    return _encoded(samples_S, rate)


def picture_clip(figure: Any) -> Clip:
    """A matplotlib figure as SVG, whose texts the browser draws: it has fonts for all scripts,
    joins letters, places marks and orders texts that run from right to left."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}), catch_warnings():
        # The browser has other fonts than matplotlib, which only estimates the sizes of texts.
        filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", dpi=_DOTS_PER_INCH, metadata={"Date": None})
    # The images inside are in base64 already; the rest is short.
    return Clip(f"data:image/svg+xml,{quote(file.getvalue(), safe=_UNQUOTED)}")


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(samples_S: Any, rate: int) -> Clip:
    import soundfile

    file = io.BytesIO()
    if "MP3" in soundfile.available_formats():
        soundfile.write(file, samples_S, rate, format="MP3", compression_level=_COMPRESSION)
        return Clip(data_url("audio/mpeg", file.getvalue()))
    soundfile.write(file, samples_S, rate, format="WAV", subtype="PCM_16")
    return Clip(data_url("audio/wav", file.getvalue()))
