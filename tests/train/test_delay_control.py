"""The controller of the delay penalty: its estimate, its aim, and its state."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.supervision import AlignmentItem

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.input.batch import AlignedWord, Batch
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.loss.results import Occupancy
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks import delay_control
from pruned_rnnt.train.tasks.delay_control import DelayControl, _counts, _quantile
from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment
from tests.train.failures import run_out_of_memory
from tests.train.processes import run_ranks
from tests.train.run_files import checkpoint_of, killed_at

TOKENIZER = train_tokenizer(["one two three"], TokenizerConfig(kind="char"))
TEXT = "one two three"
# The ends of the words in frames of 40 ms, and their last symbols among those of the text.
ENDS, LAST = (10, 20, 30), (3, 7, 13)


def batch_of(utterances: int = 4, *, known: bool = True, tempo: float = 1.0) -> Batch:
    words = tuple(
        AlignedWord(word=word, start=0.04 * end - 0.2, duration=0.2)
        for word, end in zip(TEXT.split(), ENDS, strict=True)
    )
    frames = round(200 * tempo)
    targets = torch.tensor([TOKENIZER.encode(TEXT)] * utterances, dtype=torch.int32)
    return Batch(
        features_NTF=torch.zeros(utterances, frames, 80),
        feature_lengths_N=torch.full((utterances,), frames),
        targets_NU=targets,
        target_lengths_N=torch.full((utterances,), targets.size(1)),
        texts=(TEXT,) * utterances,
        ids=tuple(map(str, range(utterances))),
        durations=(2.0,) * utterances,
        lengths_before=(200,) * utterances,
        words=(words if known else (),) * utterances,
    )


def losses_of(batch: Batch, delays: np.ndarray, tempo: float = 1.0) -> ModelLosses:
    """Occupancies that emit the last symbols of words some frames after the ends; (N, 3)."""
    utterances, symbols = batch.targets_NU.shape
    emit = torch.zeros(utterances, 50, symbols + 1)
    for n in range(utterances):
        for end, last, delay in zip(ENDS, LAST, delays[n], strict=True):
            # Emission in frame t ends at t + 1; half of the mass is in each neighbour.
            frame = round(end * tempo) - 1 + int(delay)
            emit[n, frame - 1, last] = emit[n, frame + 1, last] = 0.5
    return ModelLosses(
        objective=torch.zeros(()),
        total=torch.zeros(utterances),
        parts={},
        encoded=torch.zeros(utterances, 50, 4),
        frame_lengths=torch.full((utterances,), 50),
        occupancy=Occupancy(emit, emit),
        bounds=None,
    )


def control(target: float = 0.3, first_step: int = 0, *, settled: bool = True) -> DelayControl:
    controller = DelayControl(target, 0.0, first_step, TOKENIZER, Ranks())
    controller.is_settled = settled
    return controller


@pytest.mark.parametrize("tempo", [1.0, 0.9])
def test_delays_are_those_of_the_last_symbols_of_words(tempo: float) -> None:
    delays = np.array([[0, 2, 4], [5, 1, 3]])
    batch = batch_of(2, tempo=tempo)
    controller = control()
    controller.observe(batch, losses_of(batch, delays, tempo))
    assert controller.state_dict()["delays"] == pytest.approx(0.04 * delays.flatten(), abs=1e-5)


def test_delays_with_two_views_are_those_of_the_first() -> None:
    delays = np.array([[0, 2, 4], [5, 1, 3]])
    batch = batch_of(2)
    losses, other = losses_of(batch, delays), losses_of(batch, delays + 3)
    assert losses.occupancy is not None
    assert other.occupancy is not None
    views = map(torch.cat, zip(losses.occupancy, other.occupancy, strict=True))
    controller = control()
    controller.observe(batch, replace(losses, occupancy=Occupancy(*views)))
    assert controller.state_dict()["delays"] == pytest.approx(0.04 * delays.flatten(), abs=1e-5)


def test_symbols_of_words_come_after_the_language_tag() -> None:
    """Silence in an alignment is no word."""
    tagged = train_tokenizer(["one two three"], TokenizerConfig(kind="char", languages=("en",)))
    plain = batch_of(1)
    silence = AlignedWord(word="", start=0.0, duration=0.1)
    batch = replace(
        plain,
        texts=("one two three",),
        languages=("en",),
        targets_NU=torch.tensor([tagged.encode(TEXT, "en")], dtype=torch.int32),
        target_lengths_N=torch.tensor([plain.targets_NU.size(1) + 1]),
        words=((silence, *plain.words[0]),),
    )
    emit = losses_of(plain, np.array([[0, 2, 4]])).occupancy
    assert isinstance(emit, Occupancy)
    shifted = torch.nn.functional.pad(emit.emit, (1, 0))
    losses = losses_of(batch, np.zeros((1, 3)))
    losses = replace(losses, occupancy=Occupancy(shifted, shifted))
    controller = DelayControl(0.3, 0.0, 0, tagged, Ranks())
    controller.observe(batch, losses)
    assert controller.state_dict()["delays"] == pytest.approx([0.0, 0.08, 0.16], abs=1e-5)


def test_silence_around_an_utterance_is_no_change_of_tempo() -> None:
    plain = batch_of(1)
    (words,) = plain.words
    batch = replace(
        plain,
        feature_lengths_N=plain.feature_lengths_N + 200,
        lengths_before=(400,),
        words=(tuple(replace(word, start=word.start + 1.0) for word in words),),
    )
    ends = [end.seconds for end in control()._word_ends(batch)]
    assert ends == pytest.approx([1 + 0.04 * end for end in ENDS])


@pytest.mark.parametrize("language", ["en", "de"])
def test_joined_utterances_of_several_languages_have_no_word_times(language: str) -> None:
    """Each part has the tag of its language."""
    tagged = train_tokenizer([TEXT], TokenizerConfig(kind="char", languages=("en", "de")))
    symbols = [*tagged.encode("one two", "en"), *tagged.encode("three", language)]
    if language == "en":  # as utterances of one language are joined
        symbols = tagged.encode(TEXT, "en")
    batch = replace(
        batch_of(1),
        languages=("en",),
        targets_NU=torch.tensor([symbols], dtype=torch.int32),
        target_lengths_N=torch.tensor([len(symbols)]),
    )
    found = DelayControl(0.3, 0.0, 0, tagged, Ranks())._word_ends(batch)
    assert [end.symbol for end in found] == ([4, 8, 14] if language == "en" else [])


def penalties_of_steps(ranks: Ranks, config: ExperimentConfig, batches: list[Batch]) -> list[str]:
    """Problems of steps in which the second process has no batch, or no memory to copy it."""
    trainer = speech_trainer(config, ranks)
    trainer.model.train()
    problems = [trainer.stepper(batches, 0).report().problem]
    is_second = ranks.rank == 1
    problems.append(trainer.stepper([] if is_second else batches, 1).report().problem)
    if is_second:
        trainer.stepper._copies = lambda batch: run_out_of_memory(torch.device("cpu"))  # type: ignore
    problems.append(trainer.stepper(batches, 2).report().problem)
    return problems


@pytest.mark.slow
def test_processes_agree_on_the_penalty_without_a_batch(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    _add_times(corpus)
    config = tiny_experiment(corpus, tmp_path / "run", "loss.target_delay_ms=200")
    batches = list(islice(DataModule(config.data).train_loader(), 1))
    first, second = run_ranks(2, penalties_of_steps, config, batches)
    assert first == ["", "", "out of memory (in another process)"]
    assert second[:2] == ["", ""]
    assert second[2].startswith("out of memory (")


def test_percentile_of_counted_delays() -> None:
    seconds = np.random.default_rng(0).gamma(3.0, 0.1, size=4000).tolist()
    found = _quantile(_counts(seconds))
    assert found == pytest.approx(np.percentile(seconds, 95), abs=0.005)
    assert _quantile(_counts([])) is None
    assert _quantile(_counts([-99.0] * 3)) == pytest.approx(-2, abs=0.01)
    assert _quantile(_counts([99.0] * 3)) == pytest.approx(6, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "slope", "lag"), [(0.2, 15, 30), (0.35, 25, 65), (0.2, 60, 65), (0.2, 25, 150)]
)
def test_penalty_reaches_the_target_that_validation_measures(
    target: float, slope: float, lag: float
) -> None:
    """A model whose delay follows the penalty slowly; greedy search is 80 ms later than it says."""
    controller, batch = control(target, settled=False), batch_of(4)
    rng = np.random.default_rng(0)
    delay = 0.5
    measured, penalties = list[float](), list[float]()
    for step in range(1600):
        penalty = controller.begin(step)
        delay += (0.5 - slope * penalty - delay) / lag
        frames = np.clip(rng.normal(delay / 0.04, 1.0, size=(4, 3)), -5, 18)
        controller.observe(batch, losses_of(batch, frames.round()))
        penalties.append(penalty)
        if step % 50 == 49:
            greedy = rng.normal(delay + 0.08, 0.04, size=2000)
            measured.append(float(np.percentile(greedy, 95)))
            controller.correct(greedy.tolist(), 0.1)
    assert measured[-10:] == pytest.approx([target] * 10, abs=0.02)
    # The 95th percentile of greedy search is 146 ms above the delay.
    assert max(penalties) < 2 * (0.5 + 0.146 - target) / slope


def test_no_penalty_if_the_delay_is_below_the_target() -> None:
    controller, batch = control(1.0), batch_of()
    for step in range(30):
        assert controller.begin(step) == 0.0
        controller.observe(batch, losses_of(batch, np.zeros((4, 3))))


def test_penalty_waits_for_the_first_step() -> None:
    controller, batch = control(first_step=5), batch_of()
    penalties = []
    for step in range(8):
        penalties.append(controller.begin(step))
        assert controller.begin(step) == penalties[-1]  # another batch of the step
        controller.observe(batch, losses_of(batch, np.full((4, 3), 15)))
    assert penalties[:5] == [0.0] * 5
    assert 0 < penalties[5] < penalties[6] < penalties[7]


def test_penalty_waits_until_the_delay_has_settled() -> None:
    controller, batch = control(settled=False), batch_of()

    def penalty(step: int) -> float:
        found = controller.begin(step)
        controller.observe(batch, losses_of(batch, np.full((4, 3), 15)))
        return found

    # No validation; most words are wrong; the delay still falls.
    for step, seconds, wrong in ((0, None, 0), (1, 0.9, 0.8), (2, 0.9, 0.6), (3, 0.8, 0.3)):
        assert penalty(step) == 0.0
        if seconds is not None:
            controller.correct([seconds], wrong)
    assert penalty(4) == 0.0
    controller.correct([0.77], 0.3)
    assert penalty(5) > 0.0
    # For good: the penalty itself changes the delay.
    controller.correct([0.6], 0.3)
    assert penalty(6) > 0.0


def test_state_is_complete() -> None:
    rng, batch = np.random.default_rng(0), batch_of()
    one, other = control(), control(settled=False)
    for step in range(40):
        delays = rng.integers(0, 15, size=(4, 3))
        if step == 20:
            one.correct([0.9, 1.0], 0.1)
            state = one.state_dict()  # with delays that have not been used yet
            other.load_state_dict(state)
        penalty = one.begin(step)
        one.observe(batch, losses_of(batch, delays))
        if step >= 20:
            assert other.begin(step) == penalty
            other.observe(batch, losses_of(batch, delays))
    assert one.state_dict() == other.state_dict()


def test_data_without_word_times_are_an_error() -> None:
    controller, batch = control(), batch_of(known=False)
    for step in range(20):
        controller.begin(step)
        controller.observe(batch, losses_of(batch, np.zeros((4, 3))))
    with pytest.raises(UsageError, match="needs the times of words, and 20 steps had none"):
        controller.begin(20)


def test_validation_without_word_times_is_an_error(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    experiment = tiny_experiment(corpus, tmp_path / "run", "loss.target_delay_ms=200")
    with pytest.raises(UsageError, match=r"the validation set dev had none: .* --split dev"):
        speech_trainer(experiment)


def test_training_refuses_a_negative_fastemit(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    experiment = tiny_experiment(corpus, tmp_path / "run", "loss.fastemit_lambda=-0.1")
    with pytest.raises(UsageError, match=r"loss\.fastemit_lambda is -0\.1, needs at least 0"):
        speech_trainer(experiment)


def test_settings() -> None:
    assert LossConfig(target_delay_ms=-40.0).target_delay_ms == -40
    with pytest.raises(ValueError, match=r"target_delay_ms is nan, needs a finite number"):
        LossConfig(target_delay_ms=float("nan"))
    for kind in ("full", "ctc"):
        changes: dict[str, Any] = {"kind": kind, "target_delay_ms": 300.0}
        with pytest.raises(ValueError, match=r"needs loss\.kind=pruned, .*set it to null"):
            LossConfig(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("durations", ["[]", "[0,1,2]"])
def test_continued_training_is_the_same(
    durations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In eight steps, most words stay wrong.
    monkeypatch.setattr(delay_control, "_MOST_WRONG", 2.0)
    monkeypatch.setattr(delay_control, "_SETTLED", 9.0)
    corpus = make_corpus(tmp_path / "corpus")
    _add_times(corpus)
    settings = [
        "train.steps=8",
        "train.validate_every=3",
        "loss.warm_up_steps=2",
        "loss.target_delay_ms=0",
        "loss.delay_penalty=0.01",
        f"loss.durations={durations}",
    ]
    whole = tiny_experiment(corpus, tmp_path / "whole", *settings)
    speech_trainer(whole).run()
    parts = tiny_experiment(corpus, tmp_path / "parts", "train.save_every=5", *settings)
    with killed_at(6):
        speech_trainer(parts).run()
    speech_trainer(parts).run()
    first, second = (checkpoint_of(tmp_path / name, 8) for name in ("whole", "parts"))
    penalties = [values[".task.0.delay.penalty"] for values in (first, second)]
    assert penalties[0] == penalties[1] != 0.01
    for name in first:
        if not name.startswith(".config.train.save_every"):
            assert first[name] == second[name], name
    with pytest.raises(ConfigError, match="target_delay_ms"):
        speech_trainer(
            tiny_experiment(corpus, tmp_path / "whole", *settings, "loss.target_delay_ms=80")
        )


def _add_times(corpus: Path) -> None:
    for path in corpus.glob("*_cuts.jsonl.gz"):
        CutSet.from_cuts([_with_times(cut) for cut in CutSet.from_file(path)]).to_file(path)


def _with_times(cut: Any) -> Any:
    (supervision,) = cut.supervisions
    words = supervision.text.split()
    length = cut.duration / len(words)
    items = [AlignmentItem(word, n * length, length) for n, word in enumerate(words)]
    return replace(cut, supervisions=[replace(supervision, alignment={"word": items})])
