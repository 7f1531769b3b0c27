//! Configuration files.

mod documentation;
mod examples;
mod roll_file;
mod roll_page;
mod run_config;
