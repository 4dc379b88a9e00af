"""`pruned-rnnt prepare mini_librispeech`: five hours of LibriSpeech, to test an installation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from pruned_rnnt.recipes.librispeech.prepare import downloader, reader

from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, run_recipe
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence


def _parts(options: argparse.Namespace) -> Sequence[str]:
    return ("train-clean-5", "dev-clean-2")


# The published dev part is the test set here, and dev is drawn from training, so that no result is
# reported on the set that selects the checkpoint.
RECIPE = CorpusRecipe(
    name="mini_librispeech",
    licence=Licence(id="CC-BY-4.0", source="https://www.openslr.org/31/"),
    download=downloader(_parts),
    manifests=reader(_parts),
    splits={"train": ["train-clean-5"], "test": ["dev-clean-2"]},
    tokenizer=TokenizerConfig(kind="bpe", vocab_size=200),
    dev_share=0.05,
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
