//! Data files in CSV and Parquet.

use std::fs;
use std::path::PathBuf;

use candle_grpo_train::data::{Row, read_rows};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

fn named(name: &str, contents: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, contents).unwrap();
    (folder, path)
}

fn columns(rows: Vec<Row>) -> Vec<Value> {
    rows.into_iter().map(|row| row.columns).collect()
}

fn error_of(name: &str, contents: impl AsRef<[u8]>) -> String {
    let (_folder, path) = named(name, contents);
    format!("{:#}", read_rows(&path).unwrap_err())
}

#[test]
fn csv_rows_have_the_names_of_the_first_line_and_their_own_lines() {
    let text = "\u{feff}question,answer\r\n\"Why, \"\"so\"\"?\nReally?\",007\r\n\r\nHow?,\r\n";
    let (_folder, path) = named("data.csv", text);
    let rows = read_rows(&path).unwrap();
    let lines: Vec<usize> = rows.iter().map(|row| row.line).collect();
    assert_eq!(lines, [2, 5]);
    assert_eq!(
        columns(rows),
        [
            json!({"question": "Why, \"so\"?\nReally?", "answer": "007"}),
            json!({"question": "How?", "answer": ""}),
        ]
    );
    let (_folder, path) = named("data.TSV", "a\tb\n1,5\tx y\n");
    let rows = columns(read_rows(&path).unwrap());
    assert_eq!(rows, [json!({"a": "1,5", "b": "x y"})]);
}

#[rstest]
#[case(
    "a,b\n1,2\n\n1,2,3\n",
    "data.csv:4: 3 fields, must be 2 as in the first line"
)]
#[case("a,b\n1\n", "data.csv:2: 1 fields, must be 2 as in the first line")]
#[case("a,b,a\n1,2,3\n", "data.csv:1: column \"a\" twice")]
#[case(
    "a,b\n1,2\n3,\"4\n5,6\n",
    "data.csv:3: the file has an odd number of quotation marks"
)]
#[case("a,b\n", "data.csv: has no rows")]
#[case("", "data.csv: has no rows")]
#[case("a,b\n\u{0}", "data.csv:2: 1 fields")]
fn a_csv_file_that_is_not_valid_names_its_line(#[case] text: &str, #[case] words: &str) {
    let error = error_of("data.csv", text);
    assert!(error.contains(words), "{error}");
}

#[cfg(feature = "parquet")]
mod parquet {
    use std::path::Path;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parquet");
        folder.join(name)
    }

    /// `make.py` wrote the files with pyarrow, and the rows that pyarrow reads from them.
    #[rstest]
    #[case("verl-zstd", "verl")]
    #[case("verl-uncompressed", "verl")]
    #[case("types-snappy", "types")]
    #[case("types-gzip-v2", "types")]
    #[case("many-snappy", "many")]
    #[case("many-zstd-delta", "many")]
    fn a_file_of_pyarrow_has_the_rows_that_pyarrow_reads(#[case] name: &str, #[case] rows: &str) {
        let read = read_rows(&fixture(&format!("{name}.parquet"))).unwrap();
        let numbers: Vec<usize> = read.iter().map(|row| row.line).collect();
        assert_eq!(numbers, (1..=read.len()).collect::<Vec<_>>());
        let expected = read_rows(&fixture(&format!("{rows}.jsonl"))).unwrap();
        assert_eq!(columns(read), columns(expected));
    }

    #[test]
    fn the_columns_of_verl_are_prompts_and_answers() {
        use candle_grpo_train::data::Question;
        use candle_grpo_train::{DatasetConfig, RewardConfig};

        let data = DatasetConfig {
            train: vec![fixture("verl-zstd.parquet")],
            held_out_rows: Some(2),
            ..DatasetConfig::default()
        };
        let data = data.load(0).unwrap();
        assert_eq!((data.train.len(), data.held_out.len()), (3, 2));
        let row = &data.train[0];
        let index = &row.columns["extra_info"]["index"];
        let asked = format!("What is {index} + {index}?");
        let messages = [("system", "Think."), ("user", asked.as_str())];
        let messages = messages.map(|(role, text)| json!({"role": role, "content": text}));
        assert_eq!(
            data.question(row).unwrap(),
            Question::Messages(messages.into())
        );
        let reward: RewardConfig = serde_json::from_value(
            json!({"kind": "numeric", "column": "reward_model.ground_truth"}),
        )
        .unwrap();
        reward.check_row(&row.columns).unwrap();
    }

    #[test]
    fn an_unknown_codec_names_file_group_and_column() {
        let error = format!("{:#}", read_rows(&fixture("brotli.parquet")).unwrap_err());
        assert!(
            error.ends_with(
                "brotli.parquet: row group 1: column \"data_source\": compressed with BROTLI, must be with SNAPPY, GZIP, ZSTD or not at all"
            ),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_page_names_file_row_and_column() {
        let mut bytes = fs::read(fixture("many-snappy.parquet")).unwrap();
        // Within the first page of the first column.
        bytes[40..60].fill(0xff);
        let error = error_of("data.parquet", bytes);
        assert!(
            error.contains("data.parquet: row ")
                && error.contains(", column \"prompt\": the file is damaged: "),
            "{error}"
        );
        let whole = fs::read(fixture("verl-zstd.parquet")).unwrap();
        for length in [4, 8, 100, whole.len() - 1] {
            let error = error_of("data.parquet", &whole[..length]);
            assert!(
                error.contains("data.parquet: the file is damaged: "),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_with_any_damaged_byte_is_read_or_an_error() {
        for name in ["verl-uncompressed.parquet", "many-zstd-delta.parquet"] {
            let whole = fs::read(fixture(name)).unwrap();
            let (_folder, path) = named("data.parquet", &whole);
            for at in 4..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 0x91;
                fs::write(&path, damaged).unwrap();
                if let Err(error) = read_rows(&path) {
                    let error = format!("{error:#}");
                    assert!(error.contains("data.parquet: "), "{at}: {error}");
                }
            }
        }
    }
}
