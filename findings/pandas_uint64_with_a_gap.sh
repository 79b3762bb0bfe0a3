#!/usr/bin/env bash
# pandas 3.1.1, Python 3.11 to 3.13: read_csv loses a missing value in a column of large unsigned integers.
#
# A column whose integers need uint64 (above 2^63 - 1, as hashes and identifiers do) is read as uint64 where it is complete.
# With one empty field the whole column becomes text, and the empty field becomes the empty text '', which isna() does not
# see. The nullable types do not help, although UInt64 can hold both. A column whose integers fit int64 is read as one
# expects: Int64 with <NA>, or float64 with NaN.
#
# Behaviour seen: dtypes `str` / `string`, values ['18446744073709551615', ''], isna [False, False], no warning.
# Expected: UInt64 with <NA> (nullable), or a missing value in whatever type.
# What helps: dtype={"a": "UInt64"}, which gives [18446744073709551615, <NA>] exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pandas==3.1.1
"$folder/venv/bin/python" - <<'PYTHON'
import io

import pandas as pd

whole, gap = "a,b\n18446744073709551615,1\n3,2\n", "a,b\n18446744073709551615,1\n,2\n"
small = "a,b\n9223372036854775807,1\n,2\n"
for options in ({}, {"dtype_backend": "numpy_nullable"}):
    read = pd.read_csv(io.StringIO(whole), **options)["a"]
    assert str(read.dtype).lower() == "uint64" and read.tolist() == [2**64 - 1, 3], read
    read = pd.read_csv(io.StringIO(gap), **options)["a"]
    print(options, read.dtype, read.tolist(), read.isna().tolist())
    assert read.tolist() == ["18446744073709551615", ""], "it changed: the gap is kept now?"
    assert read.isna().tolist() == [False, False], "it changed: the gap is seen now"
    assert pd.read_csv(io.StringIO(small), **options)["a"].isna().tolist() == [False, True]
named = pd.read_csv(io.StringIO(gap), dtype={"a": "UInt64"})["a"]
assert named.isna().tolist() == [False, True] and int(named[0]) == 2**64 - 1, named
PYTHON
