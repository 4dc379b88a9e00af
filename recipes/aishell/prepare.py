"""`pruned-rnnt prepare aishell`: read Mandarin by 400 speakers; symbols are characters."""

from __future__ import annotations

from functools import partial

from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, run_recipe
from pruned_rnnt.data.tokens.text_normalisation import TextConfig
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence

RECIPE = CorpusRecipe(
    name="aishell",
    licence=Licence(id="Apache-2.0", source="https://www.openslr.org/33/"),
    splits={"train": ["train"], "dev": ["dev"], "test": ["test"]},
    tokenizer=TokenizerConfig(kind="char", vocab_size=5000),
    text=TextConfig(spaces="remove"),
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
