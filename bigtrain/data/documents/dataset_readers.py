"""Readers of Hugging Face datasets, saved in a directory or on the Hub, one document per row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bigtrain.data.documents.files import Source
from bigtrain.data.documents.json_columns import decoders_of
from bigtrain.data.documents.key_rules import names_in
from bigtrain.data.documents.reader import ReadOptions, SourcePart, even_parts
from bigtrain.data.documents.table_readers import TableReader, tree_of
from bigtrain.data.documents.table_rows import (
    RowBlock,
    columns_of,
    decoded,
    joined_rows,
    rows_per_read,
    stored_columns,
)
from bigtrain.errors import DataError, first_line

STREAMED_ROWS_PER_READ = 32
"""Rows read at a time from a dataset of unknown size."""


class _OpenPart(NamedTuple):
    """Rows of a part of a dataset. first_row: number of the first row in the source; num_rows: 0 if
    unknown."""

    dataset: Any
    first_row: int = 0
    num_rows: int = 0


class DatasetReader(TableReader):
    """Base of the readers of Hugging Face datasets."""

    @classmethod
    @abstractmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        """Return the `datasets` object. Raises DataError."""

    @abstractmethod
    def _open_part(self) -> _OpenPart:
        """Return the rows of the part."""

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        dataset = cls.open(source, options)
        if dataset.column_names is not None:
            return list(dataset.column_names)
        return next(iter(dataset), {})

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        path, keys = self.part.source.path, self.options.keys
        dataset, first_row, num_rows = self._open_part()
        # Names and features of the columns are unknown (None) for some streamed datasets.
        row, all_names = first_row, dataset.column_names
        counted_names = all_names
        if dataset.features is not None:
            column_tree = tree_of(dataset.features.arrow_schema)
            counted_names = names_in(column_tree, self.options.key_rules.read_keys)
        if all_names is not None:
            read_columns = columns_of(path, keys, all_names)
            dataset = dataset.select_columns(stored_columns(read_columns, all_names))
        # `datasets` decodes JSON itself, except for features with decode=False.
        features = {} if dataset.features is None else dataset.features.to_dict()
        decoders = decoders_of({}, features, is_text=False)
        rows_at_once = STREAMED_ROWS_PER_READ
        if num_rows:
            rows_at_once = rows_per_read(dataset.data.nbytes, dataset.data.num_rows)
        try:
            for batch in dataset.iter(rows_at_once):
                names = list(batch)
                self.columns = columns = columns_of(path, keys, names)

                def values_of(name: str, batch: Any = batch) -> Sequence[Any]:
                    return decoded(name, batch[name], decoders)

                rows = joined_rows(len(batch[names[0]]), columns, keys, names, values_of)
                self.rejects.keys.add(counted_names or names, len(rows))
                share_done = (row - first_row) / num_rows if num_rows else 0.0
                yield RowBlock(row, rows, share_done)
                row += len(rows)
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # any error of the builder of a foreign format
            raise DataError(
                f"{path} cannot be read after row {row}: {first_line(error)}"
            ) from error


class SavedDatasetReader(DatasetReader):
    """Reader of rows of a directory written by ``save_to_disk``."""

    format_name = "saved_dataset"

    @classmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        import datasets

        with _opening(source.path):
            saved = datasets.load_from_disk(source.path)
            is_dict = isinstance(saved, datasets.DatasetDict)
            return saved[options.selection.dataset_split] if is_dict else saved

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return even_parts(source, len(cls.open(source, options)), shard_bytes)

    def _open_part(self) -> _OpenPart:
        dataset = self.open(self.part.source, self.options).with_format(None)
        if self.part.end is None:
            return _OpenPart(dataset, 0, len(dataset))
        dataset = dataset.select(range(self.part.begin, self.part.end))
        return _OpenPart(dataset, self.part.begin, len(dataset))


class HubDatasetReader(DatasetReader):
    """Reader of shards of a Hub dataset; streamed, to use little memory and disk."""

    format_name = "hub_dataset"

    @classmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        import datasets

        with _opening(source.path):
            return datasets.load_dataset(
                source.path,
                options.selection.dataset_config,
                split=options.selection.dataset_split,
                revision=source.record.revision,
                streaming=True,
            )

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return even_parts(source, cls.open(source, options).num_shards, None)

    def _open_part(self) -> _OpenPart:
        dataset = self.open(self.part.source, self.options)
        if self.part.end is not None:
            assert self.part.end == self.part.begin + 1, "one shard of a streamed dataset at a time"
            dataset = dataset.shard(num_shards=dataset.num_shards, index=self.part.begin)
        return _OpenPart(dataset)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """Raise DataError for an error of opening a dataset."""
    try:
        yield
    except Exception as error:  # any error of the builder of a foreign format
        raise DataError(f"--input {path} cannot be opened: {first_line(error)}") from error
