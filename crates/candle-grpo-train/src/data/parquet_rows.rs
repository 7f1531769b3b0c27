//! Rows from a Parquet file.

use std::any::Any;
use std::collections::HashSet;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::{Type, TypePtr};
use serde_json::{Map, Number, Value};

use super::rows::{Row, row};

/// Reads the rows of a Parquet file.
pub(super) fn rows(file: &Arc<Path>, source: File) -> Result<Vec<Row>> {
    let read = || -> Result<Vec<Row>> {
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
            for columns in group_rows(&reader, number, group, schema, first)? {
                rows.push(row(file, rows.len() + 1, Value::Object(columns))?);
            }
        }
        Ok(rows)
    };
    read().with_context(|| file.display().to_string())
}

/// Reads a group of rows, column by column, so that an error names the column. `first` is the
/// number of rows before the group.
fn group_rows(
    reader: &SerializedFileReader<File>,
    number: usize,
    group: &RowGroupMetaData,
    schema: &Type,
    first: usize,
) -> Result<Vec<Map<String, Value>>> {
    check_group(group).with_context(|| format!("row group {}", number + 1))?;
    let expected = group.num_rows() as usize;
    let mut rows: Vec<Map<String, Value>> = Vec::new();
    for column in schema.get_fields() {
        let mut read = 0;
        let found = guarded(|| {
            let group = reader.get_row_group(number).map_err(damaged)?;
            add_column(&*group, schema, column, &mut rows, &mut read)
        });
        found
            .and_then(|()| {
                ensure!(
                    read == expected,
                    "the file is damaged: the column ends before row {}",
                    first + expected
                );
                Ok(())
            })
            .with_context(|| format!("row {}, column {:?}", first + read + 1, column.name()))?;
    }
    Ok(rows)
}

/// Checks the sizes and codecs of a group before it is read.
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
        // Lists have at least one value a row, which may be null.
        ensure!(
            (0..=column.num_values()).contains(&group.num_rows()),
            "the file is damaged: {} rows, and {} values of column {name}",
            group.num_rows(),
            column.num_values()
        );
    }
    Ok(())
}

/// Adds a column to `rows`, which are the first ones or those of the columns before. `read` counts
/// the rows.
fn add_column(
    group: &dyn RowGroupReader,
    schema: &Type,
    column: &TypePtr,
    rows: &mut Vec<Map<String, Value>>,
    read: &mut usize,
) -> Result<()> {
    let only = Type::group_type_builder(schema.name())
        .with_fields(vec![Arc::clone(column)])
        .build()
        .map_err(damaged)?;
    for found in group.get_row_iter(Some(only)).map_err(damaged)? {
        for (name, field) in found.map_err(damaged)?.into_columns() {
            let value = json(&field)?;
            if *read == rows.len() {
                rows.push(Map::new());
            }
            rows[*read].insert(name, value);
        }
        *read += 1;
    }
    Ok(())
}

/// Converts a value to JSON.
fn json(field: &Field) -> Result<Value> {
    // JSON has no number for NaN and infinity.
    let number = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(x) => (*x).into(),
        Field::Byte(x) => (*x).into(),
        Field::Short(x) => (*x).into(),
        Field::Int(x) => (*x).into(),
        Field::Long(x) => (*x).into(),
        Field::UByte(x) => (*x).into(),
        Field::UShort(x) => (*x).into(),
        Field::UInt(x) => (*x).into(),
        Field::ULong(x) => (*x).into(),
        Field::Float16(x) => number(f64::from(*x)),
        Field::Float(x) => number(f64::from(*x)),
        Field::Double(x) => number(*x),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => match str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => {
                let digits = bytes.data().iter().map(|byte| format!("{byte:02x}"));
                digits.collect::<String>().into()
            }
        },
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => field.to_string().into(),
        Field::Group(group) => {
            let fields = group.get_column_iter();
            object(fields.map(|(name, field)| (name.clone(), field)))?
        }
        Field::ListInternal(list) => {
            let items: Result<Vec<Value>> = list.elements().iter().map(json).collect();
            Value::Array(items?)
        }
        Field::MapInternal(map) => object(map.entries().iter().map(|(key, field)| {
            let key = match key {
                Field::Str(text) => text.clone(),
                key => key.to_string(),
            };
            (key, field)
        }))?,
    })
}

fn object<'a>(fields: impl Iterator<Item = (String, &'a Field)>) -> Result<Value> {
    let mut object = Map::new();
    for (name, field) in fields {
        let value = json(field)?;
        ensure!(!object.contains_key(&name), "key {name:?} twice");
        object.insert(name, value);
    }
    Ok(Value::Object(object))
}

fn damaged(error: ParquetError) -> anyhow::Error {
    anyhow!("the file is damaged: {error}")
}

/// Calls the reader, which panics for some files that are damaged.
fn guarded<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let message = message(&*panic);
        Err(anyhow!("the file is damaged: {message}"))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it cannot be read")
}
