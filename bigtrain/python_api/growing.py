"""Added tokens of a tokenizer, and embedding rows for them: `bigtrain tokenizer --base`, `bigtrain
grow`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bigtrain.models.weights.vocabulary import Growth

NewRows = Literal["mean_covariance", "mean", "normal"]


def add_tokens(
    base: str | Path,
    output: str | Path,
    *,
    tokens: Sequence[str] = (),
    special_tokens: Sequence[str] = (),
) -> dict[str, int]:
    """Write the tokenizer `base` with tokens added to it into the directory `output`; return the
    id of each.

    base: directory or hub name. tokens: texts that become one token each. special_tokens: control
    tokens, which document text never becomes; their ids come first. All ids follow the
    highest existing one. Raises DataError; then no files remain.
    """
    from bigtrain.data.tokenizers.added_tokens import add_tokens as added
    from bigtrain.system.files import new_directory, require_free

    target = Path(output)
    require_free(target)
    tokenizer, ids = added(str(base), tokens, special_tokens)
    with new_directory(target) as directory:
        tokenizer.save(directory)
    return ids


def grow_model(
    model: str | Path,
    tokenizer: str | Path,
    output: str | Path,
    *,
    new_rows: NewRows = "mean_covariance",
    pad_to_multiple_of: int | None = None,
    seed: int = 0,
) -> Growth:
    """Write `model` with rows for the tokens of a grown `tokenizer` into the directory `output`, a
    verified Hugging Face directory; return the growth.

    model, tokenizer: directories or hub names. new_rows, pad_to_multiple_of: as
    ``model.vocabulary`` of a run. seed: of random rows. Raises ModelError or DataError;
    then nothing is written.
    """
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer
    from bigtrain.models.export.grown import export_grown
    from bigtrain.settings.run_config import VocabularySection

    vocabulary = VocabularySection(new_rows=new_rows, pad_to_multiple_of=pad_to_multiple_of)
    loaded = load_tokenizer(str(tokenizer))
    with TemporaryDirectory(prefix="bigtrain-tokenizer-") as place:
        loaded.save(Path(place))
        return export_grown(
            str(model), Path(place), loaded.vocab_size, Path(output), vocabulary, seed
        )
