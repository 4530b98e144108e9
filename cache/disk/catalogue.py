"""The cache's books: which blob takes how much of the limit, and which jobs want what kept.

Nothing here is needed for a hit, and nothing here is the truth about bytes: books that are lost or
damaged are made anew from the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.disk.blob_table import BlobTable
from penstock.cache.disk.books import Books
from penstock.cache.disk.job_table import JobTable
from penstock.cache.disk.tables import LabelTable, NameTable, NumberTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.cache.base.folders import Folder


class Catalogue:
    """A Catalogue puts the tables of a cache together over one file. Safe for several threads.

    folder: of the cache. mend: damaged books are replaced by empty ones here. Raises sqlite3.Error
    and OSError.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._books = Books(folder, mend=mend)
        self.numbers = NumberTable(self._books)
        self.blobs = BlobTable(self._books, self.numbers)
        self.jobs = JobTable(self._books)
        self.labels = LabelTable(self._books)
        self.names = NameTable(self._books)

    @property
    def is_upgrade(self) -> bool:
        """Whether the books were of an older version, and were made anew."""
        return self._books.is_upgrade

    def take_damage(self) -> tuple[str | None, str | None]:
        """What was wrong with the books that were made anew since the last call, and how the old
        file is called now if it was somebody else's."""
        books = self._books
        found, books.damage, books.moved = (books.damage, books.moved), None, None
        return found

    def writing(self) -> AbstractContextManager[None]:
        """One transaction over all tables; inside, one thread of the node is at work."""
        return self._books.writing()

    @property
    def is_counted(self) -> bool:
        """Whether somebody has put into the books what is there."""
        return self.numbers.has("used")

    def renew(self, error: Exception, enter: Callable[[], object]) -> bool:
        """Make damaged books anew, unless another process did meanwhile; whether this one did.
        error: what was found. enter: puts what is there into empty books, in the same transaction.
        """
        return self._books.renew(error, is_empty=lambda: not self.is_counted, enter=enter)

    def own_bytes(self) -> int:
        """What the books themselves take, without their log."""
        return self._books.size_bytes()

    def close(self) -> None:
        """Close the books. Safe to call twice."""
        self._books.close()
