"""The constants of this package, each with its unit and reason.

The *cut* constants are part of the disk format: changing one rebuilds every cache. The *limits*
protect against hostile input. The *working sizes* only trade memory for speed.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20

# --- cut: part of the format ------------------------------------------------------------------
CUT_MIN = 6 * MIB  # bytes of a block before a row may start the next one
CUT_MEAN = 2 * MIB  # further bytes until a row qualifies, on average: blocks of about 8 MiB
CUT_MAX = 16 * MIB  # bytes of a block at most, except for a single larger row
CUT_HASHED = 64 * KIB  # bytes of a row that decide whether it starts a block
CUT_SHORT = 256  # bytes; rows up to this are hashed in numpy, longer ones with xxh3
COLUMNAR_BLOCK = 8 * MIB  # approximate decoded bytes of a block of a columnar file
INDEX_FORMAT = 2  # version of everything that this package publishes under rows/

# --- limits -----------------------------------------------------------------------------------
MAX_ROW = 16 * MIB  # bytes of one row; a longer row is rejected unread (reason "limit")
MAX_ELEMENT = 64 * MIB  # bytes of an element of a JSON array, which is held in memory
MAX_NESTING = 256  # levels of one row, which every parser and template can handle
MAX_ARRAY_GAP = 1 * MIB  # bytes of white space before a JSON array, and around a long element
MAX_EXPANSION = 1000  # decompressed bytes per compressed byte (text reaches about 20 to 100) ...
FREE_EXPANSION = 64 * MIB  # ... counted only beyond this many decompressed bytes
MAX_BATCH = 64 * MIB  # decoded bytes of Parquet rows that are decoded at once, unless one has more
MAX_DECODED = 512 * MIB  # bytes of the rows of one block of a Parquet or Arrow file, as JSON
MAX_DECOMPRESSED = 1 << 42  # bytes of one decompressed file: 4 TiB

# --- working sizes ---------------------------------------------------------------------------
SCAN_BUFFER = 1 * MIB  # bytes; small, because numpy's temporaries are a multiple of it
STREAM_BYTES = 256 * KIB  # bytes parsed at once when iterating; dicts take ten times that
COALESCE_GAP = 16 * KIB  # bytes between two requested rows that are cheaper to read than to skip
LARGE_ROW = 1 * MIB  # bytes; a longer stretch is read alone, and only up to the end of the row
COALESCE_MAX = 4 * MIB  # bytes of one coalesced read
FRAME = 128 * KIB  # decompressed bytes of a frame of a seekable copy (stored in the copy)
FRAMES_KEPT = 16  # decompressed frames cached per copy: 2 MiB
DECODED_BYTES = 128 * MIB  # of decoded Parquet and Arrow rows cached per process
STARTS_PER_PAGE = 8 * KIB  # row offsets per checksum: 64 KiB (part of the index)
OPEN_FILES = 128  # sources with open descriptors and maps, per process
RACY_NS = 100_000_000  # age at which a timestamp proves that a file is unchanged ...
RACY_COARSE_NS = 2_500_000_000  # ... on file systems whose clock ticks in (two) seconds
EMBEDDED_BYTES = 12_000  # of file entries inside a pickle; longer lists are put in the cache
