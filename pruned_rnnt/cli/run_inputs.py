"""The inputs of results that the commands on a run share: its model, data and machine."""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.decode.timing.calibration import Calibration
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.system.code_version import code_version
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.run import LoadedModel, run_config


def run_inputs(
    config: ExperimentConfig, loaded: LoadedModel, calibration: Calibration | None = None
) -> ResultInputs:
    """The inputs of a result of `config.decode.split`, without its utterances and the search.

    Args:
        calibration: of the times in the result.
    """
    decode = config.decode
    data = Path(config.data.path).resolve().name
    own = Path(run_config(config.folder).data.path).resolve().name
    return ResultInputs(
        split=decode.split,
        data=data,
        own_data=data == own,
        utterances="",
        checkpoint=loaded.name,
        model=fingerprint(loaded.model),
        label="",
        settings={"chunk": decode.chunk, "left": decode.left},
        computation={
            "device": next(loaded.model.parameters()).device.type,
            "fused_kernels": decode.fused_kernels,
            "cuda_graphs": decode.cuda_graphs,
            "valid_max_duration": str(config.data.valid_max_duration),
            "code": str(code_version()),
            "calibration": "" if calibration is None else calibration.digest,
        },
    )
