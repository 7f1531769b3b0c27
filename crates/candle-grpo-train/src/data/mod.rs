//! Prompts: data sets, templates and row order.

pub mod chat_columns;
#[cfg(feature = "csv")]
mod csv_rows;
pub(crate) mod curriculum;
pub(crate) mod dataset;
pub(crate) mod json_lines;
mod mixed_order;
mod other_formats;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod prompt;
pub(crate) mod question;
pub(crate) mod rows;
mod shuffle;
pub(crate) mod sources;
mod unique_keys;

pub use candle_grpo_base::Template;
pub use dataset::{Dataset, DatasetConfig};
pub use json_lines::{read_json, read_json_lines};
pub use mixed_order::MixedOrder;
pub use prompt::Prompt;
pub(crate) use prompt::plain_tokens;
pub use question::Question;
pub use rows::{Row, read_first_rows, read_rows};
pub use shuffle::ShuffledOrder;
