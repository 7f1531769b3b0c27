//! Prompts from files.

mod config;
mod question;
mod read;
mod template;

pub use config::{Dataset, DatasetConfig};
pub use question::Question;
pub use read::{Row, read_rows};
pub use template::Template;
