//! Configuration files.

mod default_grpo;
mod documentation;
mod examples;
mod guides;
mod import;
mod roll_file;
mod roll_page;
mod round_trip;
mod run_config;
mod schema;
mod validator;
