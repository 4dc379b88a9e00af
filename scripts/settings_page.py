"""Writes docs/reference/settings.md, the table of all settings.

python -m scripts.settings_page
"""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.config.help import settings_as_markdown
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.lm_task import LanguageModelExperiment

PAGE = Path(__file__).parent.parent / "docs/reference/settings.md"
_HEADER = """\
# Settings

All settings of configuration files and of `section.key=value` on the command line. In a YAML file,
a section is a key with its settings indented below it. `pruned-rnnt inspect CONFIG --keys` prints
the settings of one configuration. `python -m scripts.settings_page` writes this page from the
docstrings of the configuration classes.

"""


def rendered() -> str:
    """The text of the page."""
    experiments = {
        "Recognisers": ExperimentConfig(),
        "Language models": LanguageModelExperiment(),
    }
    return _HEADER + settings_as_markdown(experiments)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
