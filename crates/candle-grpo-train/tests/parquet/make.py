"""Writes the Parquet files of the tests, and the rows that pyarrow reads from them as JSON lines.

Needs pyarrow and DuckDB: pip install pyarrow==26.0.1 duckdb==2.0.1; python3 make.py
"""

import datetime
import decimal
import json
import pathlib
import uuid

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent


def plain(value):
    """A value as the JSON that a row has."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        # A map is a list of pairs.
        if value and all(isinstance(item, tuple) for item in value):
            return {key: plain(item) for key, item in value}
        return [plain(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, (datetime.date, decimal.Decimal)):
        return str(value)
    if isinstance(value, bytes):
        return value.decode()
    return value


def write(name, form, table, **options):
    path = HERE / f"{name}-{form}.parquet"
    pq.write_table(table, path, **options)
    rows = pq.read_table(path).to_pylist()
    lines = (json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows)
    (HERE / f"{name}.jsonl").write_text("".join(lines))


def verl():
    """Rows as verl's data preprocessing writes them."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "system", "content": "Think."},
                {"role": "user", "content": f"What is {i} + {i}?"},
            ],
            "ability": "math",
            "reward_model": {"ground_truth": str(2 * i), "style": "rule"},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(5)
    ]
    return pa.Table.from_pylist(rows)


def types():
    """Each type with nulls, empty lists and several levels."""
    columns = {
        "id": pa.array([1, 2, 3, None], pa.int64()),
        "small": pa.array([-1, 127, None, 0], pa.int8()),
        "unsigned": pa.array([0, 2**63, None, 1], pa.uint64()),
        "half": pa.array([0.5, None, -2.0, 1.0], pa.float16()),
        "single": pa.array([0.5, None, -0.25, 3.0], pa.float32()),
        "double": pa.array([0.1, None, float("nan"), -1e300], pa.float64()),
        "flag": pa.array([True, None, False, True]),
        "text": pa.array(["a", "", None, "δ, \"b\"\n"]),
        "large": pa.array(["x", None, "y", "z"], pa.large_string()),
        "category": pa.array(["red", "blue", None, "red"]).dictionary_encode(),
        "bytes": pa.array([b"abc", None, b"", b"d"]),
        "day": pa.array([datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31), None]),
        "price": pa.array([decimal.Decimal("12.50"), None, decimal.Decimal("-0.01"), None], pa.decimal128(9, 2)),
        "nothing": pa.nulls(4, pa.string()),
        "list": pa.array([[1, None, 3], [], None, [4]], pa.list_(pa.int32())),
        "lists": pa.array([[["a"], [], None, ["b", None]], None, [], [["c"]]], pa.list_(pa.list_(pa.string()))),
        "struct": pa.array([{"a": 1, "b": {"c": ["x"]}}, None, {"a": None, "b": None}, {"a": 2, "b": {"c": []}}]),
        "structs": pa.array([[{"k": "a", "v": [1.5]}, {"k": None, "v": None}], [], None, [{"k": "b", "v": []}]]),
        "map": pa.array([[("a", 1), ("b", None)], None, [("c", 3)], [("d", 4)]], pa.map_(pa.string(), pa.int64())),
    }
    return pa.table(columns)


def many():
    """Enough rows for several pages and row groups."""
    return pa.table(
        {
            "prompt": [f"prompt {i}" for i in range(120)],
            "answer": pa.array([i if i % 7 else None for i in range(120)], pa.int32()),
            "words": [["w"] * (i % 4) for i in range(120)],
        }
    )


# Integers of timestamps and times, and the texts that rows have: a date and a time with the digits of the unit, and the zone
# of times in UTC.
SECONDS = 1709209845  # 2024-02-29 12:30:45 in UTC.
TIMES = {
    "naive_ms": (pa.timestamp("ms"), [SECONDS * 10**3 + 7, -1], ["2024-02-29 12:30:45.007", "1969-12-31 23:59:59.999"]),
    "naive_us": (pa.timestamp("us"), [SECONDS * 10**6 + 7, -1], ["2024-02-29 12:30:45.000007", "1969-12-31 23:59:59.999999"]),
    "naive_ns": (pa.timestamp("ns"), [SECONDS * 10**9 + 7, -1], ["2024-02-29 12:30:45.000000007", "1969-12-31 23:59:59.999999999"]),
    "utc_ms": (pa.timestamp("ms", "UTC"), [SECONDS * 10**3, 0], ["2024-02-29 12:30:45.000 +00:00", "1970-01-01 00:00:00.000 +00:00"]),
    "utc_ns": (pa.timestamp("ns", "UTC"), [SECONDS * 10**9 + 1, 0], ["2024-02-29 12:30:45.000000001 +00:00", "1970-01-01 00:00:00.000000000 +00:00"]),
    "time_ns": (pa.time64("ns"), [45_045 * 10**9 + 7, 0], ["12:30:45.000000007", "00:00:00.000000000"]),
    "time_us": (pa.time64("us"), [45_045 * 10**6 + 7, 0], ["12:30:45.000007", "00:00:00.000000"]),
    "integer": (pa.int64(), [SECONDS * 10**9, 1], [SECONDS * 10**9, 1]),
    "single": (pa.float32(), [0.1, -3.3], [0.1, -3.3]),
}


def times():
    columns = {name: pa.array(values, kind) for name, (kind, values, _) in TIMES.items()}
    ns = columns["naive_ns"]
    columns["list"] = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), ns)
    columns["struct"] = pa.StructArray.from_arrays([ns, columns["utc_ns"]], ["a", "b"])
    columns["map"] = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["k", "k"]), ns)
    pq.write_table(pa.table(columns), HERE / "times-zstd.parquet", compression="zstd")
    rows = [{name: texts[i] for name, (_, _, texts) in TIMES.items()} for i in range(2)]
    for i, row in enumerate(rows):
        a, b = row["naive_ns"], row["utc_ns"]
        row.update(list=[] if i else TIMES["naive_ns"][2], struct={"a": a, "b": b}, map={"k": a})
    lines = (json.dumps(row) + "\n" for row in rows)
    (HERE / "times.jsonl").write_text("".join(lines))


def old_times():
    """Timestamps of 96 bits, as Spark and older versions of pandas write them, and identifiers of 16 bytes."""
    ns = pa.array([SECONDS * 10**9 + 7, None, -1], pa.timestamp("ns"))
    # The first is valid UTF-8.
    identifiers = [uuid.UUID(bytes=b"0123456789abcdef"), None, uuid.UUID(int=2**128 - 1)]
    columns = {
        "time": ns,
        "never_null": pa.array([SECONDS * 10**6, 0, 1], pa.timestamp("us")),
        "id": pa.array([x and x.bytes for x in identifiers], pa.uuid()),
        "n": pa.array([1, 2, 3]),
    }
    schema = pa.schema([pa.field(name, x.type, name != "never_null") for name, x in columns.items()])
    table = pa.Table.from_arrays(list(columns.values()), schema=schema)
    pq.write_table(table, HERE / "old-times-snappy.parquet", use_deprecated_int96_timestamps=True)
    texts = [TIMES["naive_ns"][2][0], None, TIMES["naive_ns"][2][1]]
    never_null = ["2024-02-29 12:30:45.000000000", "1970-01-01 00:00:00.000000000", "1970-01-01 00:00:00.000001000"]
    lines = [
        json.dumps({"time": time, "never_null": other, "id": x and str(x), "n": n}) + "\n"
        for time, other, x, n in zip(texts, never_null, identifiers, [1, 2, 3])
    ]
    (HERE / "old-times.jsonl").write_text("".join(lines))
    # Rows inside others are not read.
    nested = pa.table({"n": [1, 2], "times": pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), ns)})
    pq.write_table(nested, HERE / "old-times-nested.parquet", use_deprecated_int96_timestamps=True)


write("verl", "zstd", verl(), compression="zstd", row_group_size=2)
write("verl", "uncompressed", verl(), compression="none", use_dictionary=False)
write("types", "snappy", types(), compression="snappy")
write("types", "gzip-v2", types(), compression="gzip", data_page_version="2.0", row_group_size=3)
write("many", "snappy", many(), compression="snappy", row_group_size=50, data_page_size=256, write_batch_size=16)
DELTA = {
    "prompt": "DELTA_BYTE_ARRAY",
    "answer": "DELTA_BINARY_PACKED",
    "words.list.element": "DELTA_LENGTH_BYTE_ARRAY",
}
write("many", "zstd-delta", many(), compression="zstd", use_dictionary=False, column_encoding=DELTA)
times()
old_times()
# A codec that is not read.
pq.write_table(verl(), HERE / "brotli.parquet", compression="brotli")
# A type that is not read, and that pyarrow does not write.
INTERVALS = "SELECT n, to_days(n::INT) + to_months(n::INT) AS wait FROM range(1, 4) rows(n)"
duckdb.sql(f"COPY ({INTERVALS}) TO '{HERE / 'interval.parquet'}' (FORMAT parquet, COMPRESSION snappy)")
