"""The files of a model of NeMo or transformers, read without running anything in them.

NeMo: an archive `MODEL.nemo` (tar, also compressed) with model_config.yaml, model_weights.ckpt and
the tokenizer's SentencePiece model. transformers: a folder with config.json, model.safetensors,
tokenizer.json, and preprocessor_config.json or processor_config.json if the features are named. A
file of the safetensors format has the length of a JSON header, the header, and the tensors.
"""

from __future__ import annotations

import json
import math
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from pruned_rnnt.interop.nemo.topology import EXTRACTOR_SECTION, TRANSFORMERS_KINDS
from pruned_rnnt.model.saved_file import (
    UnusableFileError,
    describe_no_parameters,
    lfs_advice,
    read_saved,
)

StateDict = dict[str, Tensor]

CONFIG_JSON, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
_EXTRACTOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# In several files, or as transformers wrote them before 5.0.
_OTHER_WEIGHTS = ("model.safetensors.index", "model-0", "pytorch_model")
_YAML, _CHECKPOINT, _SENTENCEPIECE = "model_config.yaml", "model_weights.ckpt", "tokenizer.model"
# A configuration or a tokenizer is a few hundred KiB.
_MOST_BYTES = 1 << 26
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_MOST_HEADER = 1 << 26
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """What the files of a model say.

    path: the archive or folder.
    config: model_config.yaml; or config.json, with preprocessor_config.json as a section.
    parameters: by their names there.
    tokenizer: the bytes of tokenizer.model or tokenizer.json.
    """

    path: Path
    config: dict[str, Any]
    parameters: StateDict
    tokenizer: bytes


def read_archive(path: Path) -> SourceFiles:
    """The files of a `.nemo` archive; only plain files directly in it are read.

    Raises:
        UnusableFileError: a file is missing, damaged, or holds code.
        FileNotFoundError: there is no archive.
    """
    try:
        with tarfile.open(path) as archive, tempfile.TemporaryDirectory() as folder:
            members = {_plain_name(member): member for member in archive if member.isfile()}
            config = _yaml(path, _bytes(path, archive, members, _YAML))
            name = _tokenizer_name(path, config, members)
            tokenizer = _bytes(path, archive, members, name)
            checkpoint = Path(folder) / _CHECKPOINT
            with checkpoint.open("wb") as file:
                source = archive.extractfile(_member(path, members, _CHECKPOINT))
                assert source is not None
                while block := source.read(1 << 24):
                    file.write(block)
            try:
                parameters = read_saved(checkpoint, "state dict")
            except UnusableFileError as error:
                reason = str(error).replace(str(checkpoint), f"{path}: {_CHECKPOINT}")
                raise type(error)(reason) from error
    except (tarfile.TarError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnusableFileError(
            f"{path} is damaged or not a .nemo archive ({reason}){lfs_advice(path)}"
        ) from error
    if fault := describe_no_parameters(parameters):
        raise UnusableFileError(f"{path}: {_CHECKPOINT} has no parameters: {fault}")
    return SourceFiles(path=path, config=config, parameters=parameters, tokenizer=tokenizer)


def _plain_name(member: tarfile.TarInfo) -> str:
    """`./model_config.yaml` as `model_config.yaml`; other paths stay, and match nothing."""
    return member.name.removeprefix("./")


def _member(path: Path, members: dict[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    if name not in members:
        shown = ", ".join(sorted(members)[:8]) or "no files"
        raise UnusableFileError(f"{path} has no {name}; it has {shown}")
    return members[name]


def _bytes(
    path: Path, archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str
) -> bytes:
    member = _member(path, members, name)
    if member.size > _MOST_BYTES:
        raise UnusableFileError(f"{path}: {name} has {member.size:,} bytes, which is no such file")
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _tokenizer_name(path: Path, config: dict[str, Any], members: dict[str, tarfile.TarInfo]) -> str:
    """The name that the configuration gives, else the only file of this kind."""
    section = config.get("tokenizer")
    if not isinstance(section, dict):
        raise UnusableFileError(
            f"{path}: {_YAML} has no tokenizer; supported: models with SentencePiece symbols (bpe)"
        )
    if section.get("type") not in ("bpe", None):
        raise UnusableFileError(
            f"{path}: tokenizer.type is {section.get('type')!r}; supported: bpe (SentencePiece)"
        )
    named = str(section.get("model_path") or "").removeprefix("nemo:")
    if named in members:
        return named
    found = [name for name in members if PurePosixPath(name).name.endswith(_SENTENCEPIECE)]
    if len(found) != 1:
        raise UnusableFileError(f"{path} has {len(found)} files *{_SENTENCEPIECE}, needs one")
    return found[0]


def _yaml(path: Path, content: bytes) -> dict[str, Any]:
    """The values of a YAML file, of which references to others stay texts."""
    try:
        values = OmegaConf.to_container(OmegaConf.create(content.decode()), resolve=False)
    except Exception as error:  # of omegaconf, PyYAML and the decoder
        raise UnusableFileError(f"{path}: {_YAML} is no YAML file") from error
    return _mapping(path, _YAML, values)


def _mapping(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnusableFileError(f"{path}: {name} is not a mapping")
    return value


def read_folder(path: Path) -> SourceFiles:
    """The files of a folder of transformers.

    Raises:
        UnusableFileError: a file is missing or damaged, or the model is another one.
    """
    config = _json(path, CONFIG_JSON)
    model_type = config.get("model_type")
    if model_type not in tuple(TRANSFORMERS_KINDS):  # it may be a list, which has no hash
        raise UnusableFileError(
            f"{path}: model_type is {model_type!r}; supported: {', '.join(TRANSFORMERS_KINDS)}. "
            "The encoder of wav2vec 2.0, HuBERT, WavLM or Whisper can be trained on: "
            "model.encoder.kind=transformers model.encoder.name_or_folder=FOLDER"
        )
    if not (path / WEIGHTS).is_file() and (other := _other_weights(path)):
        raise UnusableFileError(
            f"{path} has its weights in {other}, needs {WEIGHTS}: load the model in transformers "
            "and write it by save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    weights, tokenizer = _needed(path, WEIGHTS), _needed(path, TOKENIZER)
    if (path / _EXTRACTOR).is_file():
        config[EXTRACTOR_SECTION] = _json(path, _EXTRACTOR)
    elif (path / _PROCESSOR).is_file():
        config[EXTRACTOR_SECTION] = _json(path, _PROCESSOR).get("feature_extractor")
    return SourceFiles(
        path=path,
        config=config,
        parameters=read_safetensors(weights),
        tokenizer=tokenizer.read_bytes(),
    )


def _needed(path: Path, name: str) -> Path:
    """A file of the folder; UnusableFileError if it is missing."""
    if not (path / name).is_file():
        raise UnusableFileError(f"{path} has no {name}, which models of transformers need")
    return path / name


def _json(path: Path, name: str) -> dict[str, Any]:
    file = _needed(path, name)
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnusableFileError(f"{file} is damaged: {error}") from error
    return _mapping(path, name, values)


def _other_weights(path: Path) -> str:
    names = sorted(x.name for x in path.iterdir() if x.name.startswith(_OTHER_WEIGHTS))
    return names[0] if names else ""


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as copies.

    Raises:
        UnusableFileError: the file is damaged, or has a dtype that parameters do not have.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < size <= _MOST_HEADER:
            raise UnusableFileError(
                f"{path} is damaged or not a safetensors file{lfs_advice(path)}"
            )
        try:
            header = json.loads(file.read(size))
            entries = {str(k): v for k, v in header.items() if k != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise UnusableFileError(f"{path} is damaged: its header is not JSON") from error
    begin = _LENGTH_BYTES + size
    content = np.fromfile(path, dtype=np.uint8, offset=begin)
    return {name: _tensor(path, name, entry, content) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, content: np.ndarray[Any, Any]) -> Tensor:
    try:
        named, shape = str(entry["dtype"]), [int(x) for x in entry["shape"]]
        begin, end = (int(x) for x in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableFileError(f"{path} is damaged: its entry of {name} is {entry}") from error
    if named not in _DTYPES:
        raise UnusableFileError(
            f"{path}: {name} has the dtype {named}; supported: {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[named]
    expected = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if (
        min(shape, default=0) < 0
        or not 0 <= begin <= end <= len(content)
        or end - begin != expected
    ):
        raise UnusableFileError(f"{path} is damaged: the bytes of {name} do not fit its shape")
    return torch.from_numpy(content[begin:end].copy()).view(dtype).view(shape)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that safetensors and transformers read."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, begin = [], 0
    for name, value in tensors.items():
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, begin + len(data)],
        }
        parts.append(data)
        begin += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    path.write_bytes(b"".join((len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *parts)))
