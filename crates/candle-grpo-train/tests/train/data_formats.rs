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

#[cfg(feature = "csv")]
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

#[cfg(feature = "csv")]
#[rstest]
#[case(
    "a,b\n1,2\n\n1,2,3\n",
    "data.csv:4: 3 fields, must be 2 as in the first line"
)]
#[case("a,b\n1\n", "data.csv:2: 1 fields, must be 2 as in the first line")]
#[case("a,b,a\n1,2,3\n", "data.csv:1: column \"a\" twice")]
#[case(
    "a,b\n1,2\n3,\"4\n5,6\n",
    "data.csv:3: a field begins with a quotation mark, and none closes it"
)]
#[case(
    "q,answer\n\"abc,1\n\"def,2\n\"ghi\",3\n",
    "data.csv:3: a text follows the quotation mark that closes the field of line 2"
)]
#[case(
    "a,b\n\"1\" x,2\n",
    "data.csv:2: a text follows the quotation mark that closes the field of line 2"
)]
#[case(
    "a,b\n1,\"he said \"no\" twice\"\n",
    "data.csv:2: a text follows the quotation mark that closes the field of line 2"
)]
#[case(
    "\u{feff}q;answer\n1;2\n",
    "data.csv:1: the only column is \"q;answer\", and ';' does not separate columns; it must be ','"
)]
#[case(
    "q\tanswer\n1\t2\n",
    "and '\\t' does not separate columns; it must be ','"
)]
#[case("a,b\n", "data.csv: has no rows")]
#[case("", "data.csv: has no rows")]
#[case("a,b\n\u{0}", "data.csv:2: 1 fields")]
fn a_csv_file_that_is_not_valid_names_its_line(#[case] text: &str, #[case] words: &str) {
    let error = error_of("data.csv", text);
    assert!(error.contains(words), "{error}");
}

/// The rows that Python's csv.DictReader reads.
#[cfg(feature = "csv")]
#[rstest]
#[case("prompt,answer\na 5\" pipe,5\nb,6\n", [("a 5\" pipe", "5"), ("b", "6")])]
#[case("prompt,answer\n5\"\" x,\"\"\"y\"\n \"z\" ,6\"\r\n", [("5\"\" x", "\"y"), (" \"z\" ", "6\"")])]
#[case("prompt,answer\n\"a\nb\",\"\"\nc,\"d\"", [("a\nb", ""), ("c", "d")])]
#[case("\"prompt\",answer\r\n\"a;b\",|\n;,c\n", [("a;b", "|"), (";", "c")])]
#[case("prompt,answer\n\"a\" ,\"5\" \r\n\"b\"\t ,\"6\"\t", [("a ", "5 "), ("b\t ", "6\t")])]
fn quotation_marks_of_csv_are_read_as_python_does(
    #[case] text: &str,
    #[case] rows: [(&str, &str); 2],
) {
    let (_folder, path) = named("data.csv", text);
    let rows = rows.map(|(prompt, answer)| json!({"prompt": prompt, "answer": answer}));
    assert_eq!(columns(read_rows(&path).unwrap()), rows);
}

#[cfg(feature = "csv")]
#[test]
fn the_only_column_of_csv_may_have_another_separator_in_its_name_in_quotation_marks() {
    let (_folder, path) = named("data.csv", "\"q; or a\"\nx\ny\n");
    let rows = columns(read_rows(&path).unwrap());
    assert_eq!(rows, [json!({"q; or a": "x"}), json!({"q; or a": "y"})]);
}

#[rstest]
#[case("{\"answer\": 123456789012345678901234567890, \"q\": \"a\"}\n")]
#[case("[\n{\"answer\": 123456789012345678901234567890, \"q\": \"a\"}]")]
fn integers_of_any_size_keep_their_digits_in_prompts_and_answers(#[case] text: &str) {
    use candle_grpo_train::data::Template;
    use candle_grpo_train::rewards::NumericReward;

    let (_folder, path) = named("data.jsonl", text);
    let row = columns(read_rows(&path).unwrap()).remove(0);
    let prompt = Template::new("{q}: {answer}").unwrap().fill(&row).unwrap();
    assert_eq!(prompt, "a: 123456789012345678901234567890");
    let right = |text: &str| NumericReward::default().matches(text, &row).unwrap();
    assert!(right("123456789012345678901234567890"));
    assert!(!right("123456789012345678901234567891"));
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
    #[case("times-zstd", "times")]
    #[case("old-times-snappy", "old-times")]
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
    fn old_timestamps_inside_others_are_refused() {
        let error = read_rows(&fixture("old-times-nested.parquet")).unwrap_err();
        let error = format!("{error:#}");
        let must = "column \"times\": \"times.list.element\": INT96 timestamps inside a list, a struct or a map, must be of INT64";
        assert!(error.contains(must), "{error}");
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

    /// DuckDB writes such columns.
    #[test]
    fn an_interval_names_column_type_and_the_types_that_are_read() {
        let error = format!("{:#}", read_rows(&fixture("interval.parquet")).unwrap_err());
        let words = "interval.parquet: row group 1: column \"wait\": of type INTERVAL, must be booleans, numbers, decimals, texts, bytes, UUIDs, dates, times, timestamps, or lists, structs or maps of these";
        assert!(error.ends_with(words), "{error}");
    }

    #[test]
    fn a_damaged_page_names_file_row_and_column() {
        let mut bytes = fs::read(fixture("many-snappy.parquet")).unwrap();
        // Within the first column's first page.
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

    /// Some of these panic in the reader, of which nothing is printed. So another process reads
    /// them.
    #[test]
    fn a_file_with_any_damaged_byte_is_read_or_an_error() {
        const READS: &str = "CANDLE_GRPO_TEST_DAMAGED_BYTES";
        if std::env::var_os(READS).is_none() {
            let name = "data_formats::parquet::a_file_with_any_damaged_byte_is_read_or_an_error";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--nocapture"])
                .env(READS, "1")
                .output()
                .unwrap();
            let [text, errors] = [output.stdout, output.stderr]
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            assert!(output.status.success(), "{text}{errors}");
            assert!(text.contains("1 passed"), "{text}");
            assert!(!errors.contains("panicked"), "{errors}");
            return;
        }
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
