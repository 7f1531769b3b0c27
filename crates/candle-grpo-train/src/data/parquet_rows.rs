//! Rows from a Parquet file.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashSet;
use std::fs::File;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Once};

use anyhow::{Context, Result, anyhow, bail, ensure};
use parquet::basic::{Compression, ConvertedType, LogicalType, TimeUnit, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{Int96, Int96Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::{Type, TypePtr};
use serde_json::{Map, Number, Value};

use super::rows::{Row, row};

/// Memory that any file's rows may take.
const LEAST_LIMIT: u64 = 1 << 30;
/// Maximum memory in bytes per byte in a large file. Text compresses to about a tenth.
const LIMIT_RATIO: u64 = 64;
/// Approximate memory for a row without its values.
const ROW_BYTES: u64 = 700;
/// Approximate memory for a value without its text.
const VALUE_BYTES: u64 = 64;

/// The Julian number of the first day of 1970.
const JULIAN_DAY_OF_1970: i64 = 2_440_588;
const BILLION: i64 = 1_000_000_000;

/// The memory that the rows of a file may still take. A small file can stand for any number of
/// rows and for texts of any length.
struct Allowance {
    bytes: u64,
    limit: u64,
}

impl Allowance {
    fn of(file: &File) -> Result<Self> {
        let limit = LIMIT_RATIO.saturating_mul(file.metadata()?.len());
        let limit = limit.max(LEAST_LIMIT);
        Ok(Self {
            bytes: limit,
            limit,
        })
    }

    /// Subtracts `bytes`.
    fn take(&mut self, bytes: u64) -> Result<()> {
        match self.bytes.checked_sub(bytes) {
            Some(left) => self.bytes = left,
            None => bail!(
                "the rows take more than {} GiB of memory, which is too much for a file of this size; it must have fewer rows or shorter values, or data.max_rows must be smaller",
                self.limit >> 30
            ),
        }
        Ok(())
    }
}

/// Approximate memory for a value.
fn size(value: &Value) -> u64 {
    VALUE_BYTES
        + match value {
            Value::String(text) => text.len() as u64,
            Value::Array(items) => items.iter().map(size).sum(),
            Value::Object(object) => {
                let entries = object.iter();
                ROW_BYTES
                    + entries
                        .map(|(key, value)| key.len() as u64 + size(value))
                        .sum::<u64>()
            }
            _ => 0,
        }
}

/// Reads a Parquet file's first `limit` rows.
///
/// # Errors
///
/// Also if they take too much memory for the file size.
pub(super) fn rows(file: &Arc<Path>, source: File, limit: usize) -> Result<Vec<Row>> {
    let rows =
        Allowance::of(&source).and_then(|allowance| rows_within(file, source, limit, allowance));
    rows.with_context(|| file.display().to_string())
}

fn rows_within(
    file: &Arc<Path>,
    source: File,
    limit: usize,
    mut allowance: Allowance,
) -> Result<Vec<Row>> {
    let reader = guarded(|| SerializedFileReader::new(source).map_err(damaged))?;
    let metadata = reader.metadata();
    let schema = metadata.file_metadata().schema();
    let names: HashSet<&str> = schema.get_fields().iter().map(|x| x.name()).collect();
    ensure!(
        names.len() == schema.get_fields().len(),
        "a column twice, each must have its own name"
    );
    let mut rows = Vec::new();
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let first = rows.len();
        if first == limit {
            break;
        }
        let mut part = Part {
            reader: &reader,
            schema,
            first,
            limit: limit - first,
            allowance: &mut allowance,
        };
        for columns in part.group_rows(number, group)? {
            rows.push(row(file, rows.len() + 1, Value::Object(columns))?);
        }
    }
    Ok(rows)
}

/// Rows still to be read.
struct Part<'a> {
    reader: &'a SerializedFileReader<File>,
    schema: &'a Type,
    /// Number of rows before them.
    first: usize,
    /// Maximum number of rows.
    limit: usize,
    allowance: &'a mut Allowance,
}

impl Part<'_> {
    /// Reads a row group, column by column, so that an error can name the column.
    fn group_rows(
        &mut self,
        number: usize,
        group: &RowGroupMetaData,
    ) -> Result<Vec<Map<String, Value>>> {
        let in_group = || format!("row group {}", number + 1);
        check_group(group).with_context(in_group)?;
        // Pages are read as a whole. Their sizes count against the limit, and are then released.
        let pages = group.columns().iter();
        let pages = pages.map(|column| u64::try_from(column.uncompressed_size()).unwrap_or(0));
        let bytes = self.allowance.bytes;
        (self.allowance.take(pages.fold(0, u64::saturating_add))).with_context(in_group)?;
        self.allowance.bytes = bytes;
        let expected = (group.num_rows() as usize).min(self.limit);
        let mut rows: Vec<Map<String, Value>> = Vec::new();
        for column in self.schema.get_fields() {
            let mut read = 0;
            let found = guarded(|| {
                let group = self.reader.get_row_group(number).map_err(damaged)?;
                self.add_column(&*group, column, &mut rows, &mut read)
            });
            found
                .and_then(|()| {
                    ensure!(
                        read == expected,
                        "the file is damaged: the column ends before row {}",
                        self.first + expected
                    );
                    Ok(())
                })
                .with_context(|| {
                    format!("row {}, column {:?}", self.first + read + 1, column.name())
                })?;
        }
        Ok(rows)
    }

    /// Adds a column to `rows`, which are either new or already have the previous columns. `read`
    /// counts the rows.
    fn add_column(
        &mut self,
        group: &dyn RowGroupReader,
        column: &TypePtr,
        rows: &mut Vec<Map<String, Value>>,
        read: &mut usize,
    ) -> Result<()> {
        let only = Type::group_type_builder(self.schema.name())
            .with_fields(vec![Arc::clone(column)])
            .build()
            .map_err(damaged)?;
        let mut add = |name: String, value: Value| {
            if *read == rows.len() {
                self.allowance.take(ROW_BYTES)?;
                rows.push(Map::new());
            }
            self.allowance.take(name.len() as u64 + size(&value))?;
            rows[*read].insert(name, value);
            *read += 1;
            anyhow::Ok(())
        };
        if let Some(number) = old_timestamps(group.metadata(), column.name())? {
            let mut values = OldTimestamps::new(group, number)?;
            let mut left = self.limit;
            while left > 0
                && let Some(part) = values.next(left)?
            {
                left -= part.len();
                for value in part {
                    add(column.name().to_owned(), value)?;
                }
            }
            return Ok(());
        }
        let found = group.get_row_iter(Some(only)).map_err(damaged)?;
        for found in found.take(self.limit) {
            for (name, field) in found.map_err(damaged)?.into_columns() {
                add(name, json(&field, Some(column))?)?;
            }
        }
        Ok(())
    }
}

/// The number of a column with timestamps of 96 bits, as older programs write them.
///
/// # Errors
///
/// If they are in a list, a struct or a map.
fn old_timestamps(group: &RowGroupMetaData, name: &str) -> Result<Option<usize>> {
    for (number, column) in group.columns().iter().enumerate() {
        let path = column.column_path().parts();
        if column.column_type() == PhysicalType::INT96 && path[0] == name {
            ensure!(
                path.len() == 1 && column.column_descr().max_rep_level() == 0,
                "{}: INT96 timestamps inside a list, a struct or a map, must be of INT64; pyarrow writes those without use_deprecated_int96_timestamps",
                column.column_path()
            );
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// Reads timestamps of 96 bits, which the reader of rows cuts to milliseconds.
struct OldTimestamps {
    reader: ColumnReaderImpl<Int96Type>,
    levels: Vec<i16>,
    values: Vec<Int96>,
}

impl OldTimestamps {
    fn new(group: &dyn RowGroupReader, number: usize) -> Result<Self> {
        let reader = group.get_column_reader(number).map_err(damaged)?;
        let ColumnReader::Int96ColumnReader(reader) = reader else {
            bail!("the file is damaged: the column has another type");
        };
        Ok(Self {
            reader,
            levels: Vec::new(),
            values: Vec::new(),
        })
    }

    /// Returns the next values, at most `most`, or none at the end.
    fn next(&mut self, most: usize) -> Result<Option<Vec<Value>>> {
        self.levels.clear();
        self.values.clear();
        let read = self.reader.read_records(
            most.min(1024),
            Some(&mut self.levels),
            None,
            &mut self.values,
        );
        let (records, _, _) = read.map_err(damaged)?;
        let mut values = self.values.iter();
        // A column that is never null has no levels.
        let mut present = self.levels.iter().map(|level| *level > 0);
        let next = |_| {
            if present.next().unwrap_or(true) {
                values
                    .next()
                    .map_or(Value::Null, |time| old_timestamp(time).into())
            } else {
                Value::Null
            }
        };
        Ok((records > 0).then(|| (0..records).map(next).collect()))
    }
}

/// A timestamp of 96 bits as a text: the nanoseconds of a day, and its Julian number. It has no
/// zone.
fn old_timestamp(time: &Int96) -> String {
    let [low, high, day] = *time.data() else {
        return String::new();
    };
    let nanoseconds = i64::from(low) | i64::from(high) << 32;
    let days = i64::from(day.cast_signed()) - JULIAN_DAY_OF_1970;
    let seconds = days * 86400 + nanoseconds.div_euclid(BILLION);
    without_zone(nanosecond_text(seconds, nanoseconds.rem_euclid(BILLION)))
}

/// Checks the sizes, codecs and types of a group before it is read.
fn check_group(group: &RowGroupMetaData) -> Result<()> {
    for column in group.columns() {
        let codec = column.compression();
        let is_read = matches!(
            codec,
            Compression::UNCOMPRESSED
                | Compression::SNAPPY
                | Compression::GZIP(_)
                | Compression::ZSTD(_)
        );
        let (name, codec) = (column.column_path(), codec.to_string());
        ensure!(
            is_read,
            "column {name}: compressed with {}, must be with SNAPPY, GZIP, ZSTD or not at all",
            codec.split('(').next().unwrap_or(&codec)
        );
        ensure!(
            column.column_descr().converted_type() != ConvertedType::INTERVAL,
            "column {name}: of type INTERVAL, must be booleans, numbers, decimals, texts, bytes, UUIDs, dates, times, timestamps, or lists, structs or maps of these"
        );
        // Lists have at least one value per row, which may be null.
        ensure!(
            (0..=column.num_values()).contains(&group.num_rows()),
            "the file is damaged: {} rows, and {} values of column {name}",
            group.num_rows(),
            column.num_values()
        );
    }
    Ok(())
}

/// Converts a value to JSON. `kind` is its type, as far as the schema specifies it.
fn json(field: &Field, kind: Option<&TypePtr>) -> Result<Value> {
    let logical = kind.and_then(|kind| kind.get_basic_info().logical_type_ref());
    // JSON cannot represent NaN and infinity.
    let number = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(x) => (*x).into(),
        Field::Byte(x) => (*x).into(),
        Field::Short(x) => (*x).into(),
        Field::Int(x) => (*x).into(),
        Field::Long(x) => nanoseconds(*x, logical).map_or_else(|| (*x).into(), Value::from),
        Field::UByte(x) => (*x).into(),
        Field::UShort(x) => (*x).into(),
        Field::UInt(x) => (*x).into(),
        Field::ULong(x) => (*x).into(),
        Field::Float16(x) => number(shortest_half(f64::from(*x))),
        Field::Float(x) => number(shortest(*x)),
        Field::Double(x) => number(*x),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) if logical == Some(&LogicalType::Uuid) => uuid(bytes.data()).into(),
        Field::Bytes(bytes) => match str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => hexadecimal(bytes.data()).into(),
        },
        Field::Decimal(_) | Field::Date(_) | Field::TimeMillis(_) | Field::TimeMicros(_) => {
            field.to_string().into()
        }
        Field::TimestampMillis(_) | Field::TimestampMicros(_) => {
            zoned(field.to_string(), logical).into()
        }
        Field::Group(group) => {
            let fields = group.get_column_iter();
            object(fields.map(|(name, field)| (name.clone(), field, inside(kind, name))))?
        }
        Field::ListInternal(list) => {
            let kind = element(kind);
            let items = list.elements().iter().map(|item| json(item, kind));
            Value::Array(items.collect::<Result<_>>()?)
        }
        Field::MapInternal(map) => {
            let kind = children(kind)
                .first()
                .and_then(|entry| children(Some(entry)).get(1));
            object(map.entries().iter().map(|(key, field)| {
                let key = match key {
                    Field::Str(text) => text.clone(),
                    key => key.to_string(),
                };
                (key, field, kind)
            }))?
        }
    })
}

/// The f64 with the shortest decimal that is `x` in f32: 0.1 instead of 0.10000000149011612.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// The f64 with the shortest decimal that is `x` in float16: 0.1 instead of 0.0999755859375.
fn shortest_half(x: f64) -> f64 {
    // float16 has 10 bits after the first one, and exponents from -14.
    let exponent = x.abs().log2().floor().max(-14.);
    let half_unit = (exponent - 11.).exp2();
    let decimals = (0..5).filter_map(|digits| format!("{x:.digits$e}").parse::<f64>().ok());
    let mut near = decimals.filter(|decimal| (decimal - x).abs() < half_unit);
    near.next().unwrap_or(x)
}

/// Formats a time in nanoseconds, which the reader returns as an integer.
fn nanoseconds(x: i64, logical: Option<&LogicalType>) -> Option<String> {
    match logical? {
        LogicalType::Timestamp(time) if time.unit == TimeUnit::NANOS => {
            let text = nanosecond_text(x.div_euclid(BILLION), x.rem_euclid(BILLION));
            Some(zoned(text, logical))
        }
        LogicalType::Time(time) if time.unit == TimeUnit::NANOS => {
            let text = Field::TimeMicros(x.div_euclid(1000)).to_string();
            Some(format!("{text}{:03}", x.rem_euclid(1000)))
        }
        _ => None,
    }
}

/// A timestamp of seconds since 1970 and nanoseconds, in UTC.
fn nanosecond_text(seconds: i64, nanoseconds: i64) -> String {
    let text = Field::TimestampMillis(seconds * 1000).to_string();
    text.replacen(".000", &format!(".{nanoseconds:09}"), 1)
}

/// A timestamp without the zone, unless the file has it in UTC.
fn zoned(text: String, logical: Option<&LogicalType>) -> String {
    match logical {
        Some(LogicalType::Timestamp(time)) if !time.is_adjusted_to_u_t_c => without_zone(text),
        _ => text,
    }
}

fn without_zone(text: String) -> String {
    text.trim_end_matches(" +00:00").to_owned()
}

/// An identifier of 16 bytes in its usual form.
fn uuid(bytes: &[u8]) -> String {
    let digits = hexadecimal(bytes);
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    let parts = parts.map(|part| digits.get(part).unwrap_or_default());
    parts.join("-")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The types inside a type.
fn children(kind: Option<&TypePtr>) -> &[TypePtr] {
    match kind {
        Some(kind) if kind.is_group() => kind.get_fields(),
        _ => &[],
    }
}

/// The type of field `name` within a type.
fn inside<'a>(kind: Option<&'a TypePtr>, name: &str) -> Option<&'a TypePtr> {
    children(kind).iter().find(|field| field.name() == name)
}

/// The type of list elements: within a list's repeated group, either the repeated field itself, or
/// its own field.
fn element(list: Option<&TypePtr>) -> Option<&TypePtr> {
    let info = list?.get_basic_info();
    let is_list = info.converted_type() == ConvertedType::LIST
        || info.logical_type_ref() == Some(&LogicalType::List);
    if !is_list {
        return list;
    }
    let repeated = children(list).first();
    match children(repeated) {
        [element] => Some(element),
        _ => repeated,
    }
}

fn object<'a>(
    fields: impl Iterator<Item = (String, &'a Field, Option<&'a TypePtr>)>,
) -> Result<Value> {
    let mut object = Map::new();
    for (name, field, kind) in fields {
        let value = json(field, kind)?;
        ensure!(!object.contains_key(&name), "key {name:?} twice");
        object.insert(name, value);
    }
    Ok(Value::Object(object))
}

fn damaged(error: ParquetError) -> anyhow::Error {
    anyhow!("the file is damaged: {error}")
}

thread_local! {
    /// True while the reader runs.
    static READS: Cell<bool> = const { Cell::new(false) };
}

/// Calls the reader, which panics on some damaged files. Such a panic becomes an error, and is not
/// printed.
fn guarded<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !READS.get() {
                hook(panic);
            }
        }));
    });
    let before = READS.replace(true);
    let result = catch_unwind(AssertUnwindSafe(read));
    READS.set(before);
    result.unwrap_or_else(|panic| {
        let message = message(&*panic);
        Err(anyhow!("the file is damaged: {message}"))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a fixture with 120 rows, using `bytes` of memory.
    fn read(limit: usize, bytes: u64) -> Result<Vec<Row>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parquet");
        let file: Arc<Path> = folder.join("many-snappy.parquet").into();
        let source = File::open(&file)?;
        rows_within(
            &file,
            source,
            limit,
            Allowance {
                bytes,
                limit: 3 << 30,
            },
        )
    }

    #[test]
    fn rows_that_take_too_much_memory_are_an_error_before_it_is_taken() {
        let all = read(usize::MAX, 1 << 20).unwrap();
        assert_eq!(all.len(), 120);
        let needed = all.iter().map(|row| size(&row.columns)).sum::<u64>();
        for bytes in [0, 10_000, needed / 2] {
            let error = format!("{:#}", read(usize::MAX, bytes).unwrap_err());
            assert!(
                error.contains("the rows take more than 3 GiB of memory"),
                "{error}"
            );
        }
        assert_eq!(read(3, needed / 10).unwrap(), all[..3]);
        // The second group starts at row 51.
        assert_eq!(read(51, needed).unwrap(), all[..51]);
    }

    #[test]
    fn a_float16_has_the_digits_of_its_shortest_decimal() {
        // The nearest float16 to each decimal, as NumPy prints both.
        for (exact, decimal) in [
            (0.0999755859375, 0.1),
            (-0.333251953125, -0.3333),
            (65504., 65500.),
            (5.960464477539063e-8, 6e-8),
            (1.5, 1.5),
            (0., 0.),
        ] {
            assert_eq!(shortest_half(exact), decimal);
        }
        assert!(shortest_half(f64::NAN).is_nan());
    }

    #[test]
    fn a_timestamp_of_96_bits_keeps_its_nanoseconds() {
        // A year after the nanoseconds since 1970 of 64 bits, and one before them.
        for (day, nanoseconds, expected) in [
            (2_440_588, 0_u64, "1970-01-01 00:00:00.000000000"),
            (
                2_440_587,
                86_399_999_999_999,
                "1969-12-31 23:59:59.999999999",
            ),
            (
                2_460_370,
                45_045_000_000_007,
                "2024-02-29 12:30:45.000000007",
            ),
            (5_373_484, 1, "9999-12-31 00:00:00.000000001"),
            (1_721_426, 0, "0001-01-01 00:00:00.000000000"),
        ] {
            let parts = [nanoseconds as u32, (nanoseconds >> 32) as u32, day];
            let mut time = Int96::new();
            time.set_data(parts[0], parts[1], parts[2]);
            assert_eq!(old_timestamp(&time), expected);
        }
    }

    #[test]
    fn the_allowance_grows_with_the_file() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Allowance::of(&file).unwrap().bytes, 1 << 30);
        file.set_len(1 << 30).unwrap();
        assert_eq!(Allowance::of(&file).unwrap().bytes, 1 << 36);
    }

    #[test]
    fn a_float_has_the_digits_that_tell_it_from_its_neighbors() {
        assert_eq!(shortest(0.1), 0.1);
        assert_eq!(shortest(-3.4e38), -3.4e38);
        assert_eq!(shortest(16_777_216.), 16_777_216.);
        assert!(shortest(f32::NAN).is_nan());
    }
}
