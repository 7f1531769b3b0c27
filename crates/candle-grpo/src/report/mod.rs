//! One page about one or several runs.

mod axis;
mod chart;
mod html;
mod page;
mod panels;
mod run;

pub use page::{REPORT_START, report_html};
pub use run::{Run, RunSample};
