"""The configuration loader: merging, packaged files, and errors that name the key or the file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pruned_rnnt.config.checks import check_at_least
from pruned_rnnt.config.files import config_file, configs_folder
from pruned_rnnt.config.load import (
    ConfigError,
    differences,
    from_dict,
    load_config,
    to_dict,
    value_of,
)
from pruned_rnnt.config.written import as_override, plain_yaml, to_yaml
from pruned_rnnt.model.model_config import LossConfig
from pruned_rnnt.train.experiment import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.98)
    pair: tuple[float, float] = (0.1, 0.2)
    clip: float | None = None
    averaging: Literal["auto", "on", "off"] = "auto"
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"optimiser.learning_rate is {self.learning_rate}, needs > 0")


@dataclass(frozen=True, kw_only=True)
class Shape:
    kind: str
    colour: str = "red"


@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Polygon(Shape):
    kind: Literal["polygon"] = "polygon"
    sides: tuple[int, ...] = (3, 4)


@dataclass(frozen=True, kw_only=True)
class Picture:
    shape: Shape = field(
        default_factory=Circle, metadata={"kinds": {"circle": Circle, "polygon": Polygon}}
    )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    seed: int = 0
    title: str = ""
    names: tuple[str, ...] = ()
    split: Any = "test"
    optimiser: Optimiser = field(default_factory=Optimiser)
    picture: Picture = field(default_factory=Picture)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_then_yaml_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "seed: 3\noptimiser:\n  learning_rate: 2e-3\n")
    config = load_config(Experiment, path, ["seed=5", "optimiser.betas=[0.8,0.9]"])
    assert config.seed == 5
    assert config.optimiser.learning_rate == 2e-3
    assert config.optimiser.betas == (0.8, 0.9)
    assert config.optimiser.name == "adamw"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("word", ["on", "off"])
def test_words_that_yaml_reads_as_booleans(tmp_path: Path, word: str) -> None:
    text = f"optimiser:\n  averaging: {word}\n  nesterov: {word}\n"
    from_file = load_config(Experiment, write(tmp_path / "a.yaml", text))
    overridden = load_config(
        Experiment, None, [f"optimiser.averaging={word}", f"optimiser.nesterov={word}"]
    )
    for config in (from_file, overridden):
        assert config.optimiser.averaging == word
        assert config.optimiser.nesterov is (word == "on")


def test_nothing_is_an_empty_text_where_that_is_the_default() -> None:
    config = load_config(ExperimentConfig, "librispeech", ["data.augmentation.noise_cuts="])
    assert config.data.augmentation.noise_cuts == ""
    # As from a shell variable that is not set.
    with pytest.raises(ConfigError, match=r"train\.folder"):
        load_config(ExperimentConfig, None, ["train.folder="])


def test_nothing_takes_back_the_value_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "title: b\noptimiser:\n  clip: 1.0\n")
    assert value_of("title", path, ["seed=1"]) == "b"
    assert value_of("title", path, ["title="]) is None
    assert value_of("optimiser.clip", path, ["optimiser.clip=null"]) is None
    assert value_of("optimiser.clip", path, ["optimiser.clip=null", "optimiser.clip=2"]) == 2


def test_bounds_need_numbers() -> None:
    """Of classes that check no types; None is a value where the type has it."""
    with pytest.raises(ValueError, match=r"loss\.warm_up_steps is None, needs at least 0"):
        LossConfig(warm_up_steps=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loss\.warm_up_steps is 9, needs at least 0"):
        LossConfig(warm_up_steps="9")  # type: ignore[arg-type]
    check_at_least("optimiser", Optimiser(), clip=0)


def test_base_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "seed: 3\noptimiser: {learning_rate: 0.1}\n")
    path = write(tmp_path / "top.yaml", "base: base.yaml\nseed: 4\n")
    config = load_config(Experiment, path)
    assert (config.seed, config.optimiser.learning_rate) == (4, 0.1)


def test_base_cycle_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "base: a.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml.*back to the file itself"):
        load_config(Experiment, path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.learing_rate=1", "did you mean 'optimiser.learning_rate'"),
        ("learning_rate=1", "did you mean 'optimiser.learning_rate'"),
        ("optimizer.learning_rate=1", "did you mean 'optimiser"),
        ("sed=1", "unknown key 'sed'; did you mean 'seed'"),
        ("zzzzzz=1", "unknown key 'zzzzzz'$"),
        ("seed=abc", "'seed'.*'abc'"),
        ("optimiser=3", "'optimiser=3': is a section: set the keys in it, such as optimiser.name"),
        ("optimiser=", "'optimiser': is a section"),
        ("optimiser.name=adam", r"optimiser\.name.*adamw"),
        ("optimiser.betas=[1,q]", r"optimiser\.betas"),
        ("optimiser.betas=3", r"needs a list, such as optimiser\.betas=\[3\]"),
        ("optimiser.betas=", r"needs a list, such as optimiser\.betas=\[a, b\]"),
        ("optimiser.betas={a: 1}", r"'optimiser\.betas\.a=1'"),
        ("seed=[1]", "'seed': takes one value, not a list"),
        ("seed=", "'seed': needs a value, got none"),
        ("optimiser.learning_rate=-1", r"optimiser\.learning_rate is -1"),
        ("seed", "not of the form section.key=value"),
        ("=3", "not of the form section.key=value"),
        ("seed=[1", "cannot be read"),
        ("optimiser.pair=[0.9]", r"'optimiser\.pair=\[0\.9\]': needs 2 values, got 1"),
        ("seed=010", "override 'seed=010': YAML reads 010 as 8: write a number without leading"),
        ("seed=-1_0", "YAML reads -1_0 as -10"),
        ("seed=08", "YAML reads 08 as '08'"),
        ("optimiser.learning_rate=1:30", "YAML reads 1:30 as 90"),
        ("optimiser.learning_rate=1:30.5", "YAML reads 1:30.5 as 90.5"),
        ("optimiser.betas=[0.9,1_0.5]", "YAML reads 1_0.5 as 10.5"),
        ("title=2024_01_31", "YAML reads 2024_01_31 as 20240131"),
        ("title=1.10", "override 'title=1.10': 'title' needs a text, and YAML reads yours as 1.1"),
        ("title=1e3", r"YAML reads yours as 1000\.0: write it in quotes \(in a shell in two kinds"),
        ("title=no", r"YAML reads yours as False: write it .*, or a path with \./ before it"),
        ("names=[a,no]", "'names' needs a text, and YAML reads yours as False"),
        ("names=[1.10]", r"YAML reads yours as 1\.1:"),
        ("names=[null]", r"'names=\[None\]': needs a value, got none"),
        ("names=no", r"needs a list, such as names=\[a, b\]"),
        ("seed=1e300", "'1e.300' of type 'float' could not be converted to Integer$"),
        ("seed=1e3", "'1000.0' of type 'float' could not be converted to Integer: write 1000$"),
        ("optimiser.betas=[0.9,yes]", "'optimiser.betas=.*': Value 'True' of type 'bool'"),
        ("optimiser.pair=[a,0.1]", "'optimiser.pair=.*': Value 'a' of type 'str' could not be"),
        ("optimiser..name=sgd", "not of the form section.key=value"),
        ("optimiser.=sgd", "not of the form section.key=value"),
        ("split=null", "'split' needs a text, and YAML reads yours as None"),
        ("split=[test,null]", "YAML reads yours as None"),
        ("title=a #b", "override 'title=a #b': YAML drops '#b': leave it out, or write the text"),
        ("title=|", "YAML drops |"),
        ("title=#b", "YAML drops '#b'"),
        ("title='a' #b", "YAML drops '#b'"),
        ("names=[a] # b", "YAML drops '# b'"),
        ("seed=3 #4", "YAML drops '#4'"),
        ("title=a ", "YAML drops blanks at the ends"),
        ("title= a", "YAML drops blanks at the ends"),
        ("title= ", "YAML drops blanks:"),
        ("title=a\nb", "YAML drops .*line breaks"),
        ("title=--- a", "YAML drops '---'"),
        ("title=&b", "YAML drops '&b'"),
        ("title=&b a", "YAML drops '&b'"),
        ("names=[&b a,*b]", "YAML drops '&b'"),
        ("title=!!str 5", "YAML drops '!!str'"),
        ("title=0x10", "'title' needs a text, and YAML reads yours as 16: write it in quotes"),
        ("title=+7", "YAML reads yours as 7"),
        ("title= 7", "YAML reads yours as 7"),
        ("names=[a,0b1]", "YAML reads yours as 1:"),
        ("title=a: b", "'title': takes one value, and YAML reads yours as a section: .*in quotes"),
        ("title={a}", "YAML reads yours as a section: write a text in quotes"),
        ("title=[a]", "'title': takes one value, not a list: write a text in quotes"),
        ("title=*a", "cannot be read: found undefined alias; write a text in quotes"),
        ("title=!c", "cannot be read: .* tag '!c'; write a text in quotes"),
        ("title=@d", "cannot be read: found character that cannot .*; write a text in quotes"),
    ],
)
def test_errors_name_the_key(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Experiment, None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: [1\n", "not readable as YAML"),
        ("- 1\n- 2\n", "at the top level"),
        ("base: absent.yaml\n", r"config file not found.*absent\.yaml \(the `base` of .*\.yaml\)"),
        ("optimiser:\n  lerning_rate: 1\n", r"bad\.yaml.*did you mean"),
        ("seed: 3\noptimiser:\n  betas: [0.9, 010]\n", r"bad\.yaml, line 3: YAML reads 010 as 8"),
        (
            "optimiser.clip: 3\n",
            "write 'optimiser:' on a line of its own, and 'clip: ...' indented",
        ),
        ("optimiser:\n- name\n", r"bad\.yaml: .*is a section: set the keys in it, such as optim"),
        ("names:\n- en\n- no\n", r"bad\.yaml: 'names' needs a text.* False: write it in quotes"),
        ("title: 1.10\n", r"bad\.yaml: 'title' needs a text, and YAML reads yours as 1\.1"),
        ("base: [a.yaml]\n", r"bad\.yaml: 'base' is \['a\.yaml'\]: it takes the name of one file"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, write(tmp_path / "bad.yaml", text))


def test_numbers_and_texts_that_yaml_reads_as_written(tmp_path: Path) -> None:
    for text in ("0", "0.5", "-3", "1e-3", "0x10", "0.05"):
        given = load_config(Experiment, None, [f"optimiser.clip={text}"]).optimiser.clip
        assert given == (16 if text == "0x10" else float(text))
    assert load_config(Experiment, None, ["title=7"]).title == "7"
    assert load_config(Experiment, None, ["seed= 5 ", "names=[ a b , c ]"]).names == ("a b", "c")
    for text in ("a#b", "a:b", "a\tb", "it's", "a 'b' c", "2024-01-31", "k=v", "x[0]", "é😀"):
        assert load_config(Experiment, None, [f"title={text}"]).title == text
        assert as_override("title", text) == f"title={text}"
    assert load_config(Experiment, None, ["names=['no',7,'0x10']"]).names == ("no", "7", "0x10")
    texts = (
        "2024_01",
        "1.10",
        "1e3",
        "no",
        "010",
        "1:30",
        "a/b_0:10",
        "10:70",
        "true",
        "a # b",
        "",
        "line " * 40,
        "word " * 40 + "end",
        " a",
        "a: b",
        "*a",
        "{a}",
        "0x10",
        "+7",
        "a\nb",
        'a "b" \\ #c',
    )
    for text in texts:
        assert load_config(Experiment, None, [as_override("title", text)]).title == text
    path = write(tmp_path / "c.yaml", "title: '010'  # 010\n")
    assert load_config(Experiment, path).title == "010"


@pytest.mark.parametrize("value", ["${oc.env:SECRET}", "${oc.env", "a ${seed}", "[b, '${seed}']"])
@pytest.mark.parametrize("key", ["optimiser.name", "seed", "task"])
def test_interpolation_is_refused(
    tmp_path: Path, value: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may come from somebody else: it reads no environment, and no other keys."""
    monkeypatch.setenv("SECRET", "s3cret")
    section, _, name = key.rpartition(".")
    text = f"{name}: {value}\n"
    path = write(tmp_path / "c.yaml", f"{section}:\n  {text}" if section else text)
    write(tmp_path / "top.yaml", "base: c.yaml\n")
    tree = {section: {name: value}} if section else {name: value}
    for load in (
        lambda: load_config(Experiment, path),
        lambda: load_config(Experiment, tmp_path / "top.yaml"),
        lambda: load_config(Experiment, None, [f"{key}={value}"]),
        lambda: load_config(Experiment, base=("the base", tree)),
        lambda: from_dict(Experiment, tree, "step-1.pt"),
        lambda: value_of(key, path),
        lambda: value_of("seed", None, [f"{key}={value}"]),
    ):
        with pytest.raises(ConfigError, match=rf"{key}' holds '\$\{{'") as caught:
            load()
        message = str(caught.value)
        assert any(name in message for name in ("c.yaml", "override", "the base", "step-1.pt"))
        assert "s3cret" not in message


@pytest.mark.parametrize(
    "base", ["../outside.yaml", "sub/../../outside.yaml", "{outside}", "link.yaml", "[1]"]
)
def test_base_stays_in_the_folder_of_its_file(tmp_path: Path, base: str) -> None:
    outside = write(tmp_path / "outside.yaml", "hidden: 5\nseed: [\n")
    folder = tmp_path / "received"
    folder.mkdir()
    (folder / "link.yaml").symlink_to(outside)
    path = write(folder / "top.yaml", f"base: {base.format(outside=outside)!r}\n")
    with pytest.raises(ConfigError, match=r"top\.yaml") as caught:
        load_config(Experiment, path)
    assert "hidden" not in str(caught.value)


def test_base_may_be_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "base.yaml", "seed: 3\n")
    assert load_config(Experiment, write(tmp_path / "c.yaml", "base: sub/base.yaml\n")).seed == 3


def test_unreadable_yaml_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "wheel:x:0\nseed: 3\nsecret: [1\nother: 2\n")
    with pytest.raises(ConfigError, match=r"c\.yaml, line \d: not readable as YAML") as caught:
        load_config(Experiment, path)
    assert "wheel" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not found: .*nowhere\.yaml"):
        load_config(Experiment, tmp_path / "nowhere.yaml")


def test_packaged_file_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = configs_folder() / "own.yaml"
    assert packaged.is_file()
    assert config_file("own") == config_file("own.yaml") == packaged
    assert config_file(Path("./own.yaml")) == packaged


def test_file_in_the_current_folder_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.yaml", "seed: 5\n")
    assert load_config(Experiment, "own.yaml").seed == 5
    assert config_file("own") == configs_folder() / "own.yaml"
    (tmp_path / "own.yaml").rename(tmp_path / "own")
    assert load_config(Experiment, "own").seed == 5


def test_unknown_name_lists_the_packaged_ones() -> None:
    names = ", ".join(sorted(path.stem for path in configs_folder().glob("*.yaml")))
    message = f"config file not found: owm, and the packaged ones are {names}; did you mean 'own'?"
    with pytest.raises(ConfigError) as caught:
        config_file("owm")
    assert str(caught.value) == message
    with pytest.raises(ConfigError, match=r"not found: absent/owm$"):
        load_config(Experiment, "absent/owm")


def test_round_trips(tmp_path: Path) -> None:
    config = load_config(Experiment, None, ["optimiser.clip=2.5", "seed=9"])
    assert from_dict(Experiment, to_dict(config)) == config
    assert load_config(Experiment, write(tmp_path / "c.yaml", to_yaml(config))) == config


def test_differences_name_keys() -> None:
    old = load_config(Experiment)
    new = load_config(Experiment, None, ["optimiser.learning_rate=0.5"])
    assert differences(old, old) == []
    assert differences(old, new) == ["optimiser.learning_rate: 0.001 -> 0.5"]
    assert differences({"a": {"b": 1}}, {"c": 2}) == [
        "a.b: 1 -> (absent)",
        "c: (absent) -> 2",
    ]


def test_section_of_several_kinds(tmp_path: Path) -> None:
    assert load_config(Experiment, None, ["picture.shape.radius=2"]).picture.shape == Circle(
        radius=2.0
    )
    path = write(tmp_path / "p.yaml", "picture: {shape: {kind: polygon, colour: blue}}\n")
    config = load_config(Experiment, path, ["picture.shape.sides=[5,6]"])
    assert config.picture.shape == Polygon(colour="blue", sides=(5, 6))
    assert from_dict(Experiment, to_dict(config)) == config
    assert load_config(Experiment, write(tmp_path / "c.yaml", to_yaml(config))) == config
    back = load_config(
        Experiment, None, ["picture.shape.kind=polygon", "picture.shape.kind=circle"]
    )
    assert back == Experiment()


@pytest.mark.parametrize(
    "overrides",
    [
        ["picture.shape.kind=polygon", "picture.shape.sides=[7]"],
        ["picture.shape.sides=[7]", "picture.shape.kind=polygon"],
    ],
)
def test_another_kind_on_the_command_line_drops_the_settings_of_the_file(
    tmp_path: Path, overrides: list[str]
) -> None:
    path = write(tmp_path / "p.yaml", "picture: {shape: {kind: circle, radius: 2.5}}\n")
    shape = load_config(Experiment, path, overrides).picture.shape
    assert shape == Polygon(sides=(7,))
    with pytest.raises(ConfigError, match=r"radius"):
        load_config(Experiment, path, overrides, is_run=True)


def test_another_kind_drops_the_settings_of_the_base(tmp_path: Path) -> None:
    write(tmp_path / "first.yaml", "picture: {shape: {radius: 2.0}}\n")
    text = "base: first.yaml\npicture: {shape: {kind: polygon, sides: [5]}}\n"
    second = write(tmp_path / "second.yaml", text)
    assert load_config(Experiment, second).picture.shape == Polygon(sides=(5,))
    third = write(tmp_path / "third.yaml", "base: second.yaml\npicture: {shape: {kind: circle}}\n")
    assert load_config(Experiment, third).picture.shape == Circle()
    same = write(tmp_path / "same.yaml", "base: first.yaml\npicture: {shape: {kind: circle}}\n")
    assert load_config(Experiment, same).picture.shape == Circle(radius=2.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["picture.shape.kind=polygone"], r"kind=polygone' is none of circle, polygon; did you me"),
        (["picture.shape.kind=[1]"], "is none of circle, polygon"),
        (["picture.shape.kind=polygon", "picture.shape.radius=2"], r"unknown key.*shape\.radius"),
        (["picture.shape.kind=polygon", "picture.shape.side=2"], r"mean 'picture\.shape\.sides'"),
        (["picture.shape.raduis=2"], r"did you mean 'picture\.shape\.radius'"),
        (["picture.shap.kind=polygon"], r"did you mean 'picture\.shape"),
        (["picture.shape=3"], r"picture\.shape=3"),
        (["picture.shape.kind=polygon", "picture.shape.sides=[1,q]"], r"picture\.shape\.sides"),
    ],
)
def test_errors_of_a_section_of_several_kinds(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, None, overrides)


def test_an_encoder_that_is_not_registered_names_the_cure() -> None:
    advice = "if it is your own, import the file that calls register_encoder"
    for kind, has_advice in (("mlp", True), ("conformr", False)):
        with pytest.raises(ConfigError, match=f"kind={kind}' is none of ") as error:
            load_config(ExperimentConfig, None, [f"model.encoder.kind={kind}"])
        assert (advice in str(error.value)) == has_advice


def test_removed_settings_name_their_replacement_and_saved_runs_are_read(tmp_path: Path) -> None:
    removed: dict[str, Any] = {
        "decode": {
            "method": "fast_beam_search",
            "fast_beam": {"beam": 10.0, "max_contexts": 8, "max_states": 64},
            "refinements": 0,
        },
        "loss": {"predictor_mask_probability": 0.5},
        "optimiser": {"name": "paper_scaled_adam"},
    }
    saved = from_dict(ExperimentConfig, removed)
    assert (saved.decode.method, saved.optimiser.name) == ("modified_beam", "scaled_adam")
    assert from_dict(LossConfig, removed["loss"]) == LossConfig()
    path = tmp_path / "config.yaml"
    path.write_text(plain_yaml(removed))
    assert load_config(ExperimentConfig, path, is_run=True) == saved
    unused = {"decode": {"refinements": 0}, "loss": {"predictor_mask_probability": 0.0}}
    path.write_text(plain_yaml(unused))
    assert load_config(ExperimentConfig, path) == ExperimentConfig()
    for key, message in (
        ("decode.method=fast_beam_search", "use modified_beam"),
        ("decode.fast_beam.beam=10", "decode.method=modified_beam"),
        ("decode.refinements=1", "modified_beam"),
        ("loss.predictor_mask_probability=0.5", "loss.kind=ctc"),
        ("optimiser.name=paper_scaled_adam", "use scaled_adam"),
    ):
        name = key.replace(".beam=10", "").partition("=")[0]
        with pytest.raises(ConfigError, match=rf"'{name}[^']*' was removed: .*{message}"):
            load_config(ExperimentConfig, None, [key], is_run=True)
