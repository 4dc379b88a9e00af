"""`pruned-rnnt prepare yesno`: yes and no in Hebrew, eight words per recording."""

from __future__ import annotations

from functools import partial

from pruned_rnnt.data.prepare.corpus_recipe import CorpusRecipe, run_recipe
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig
from pruned_rnnt.licences.chain import Licence

RECIPE = CorpusRecipe(
    name="yesno",
    licence=Licence(id="CC-BY-2.0", source="https://www.openslr.org/1/"),
    splits={"train": ["train"], "test": ["test"]},
    tokenizer=TokenizerConfig(kind="word", vocab_size=5),
    dev_share=0.2,
)

# The command line; its arguments follow the recipe's name.
main = partial(run_recipe, RECIPE, __doc__)
