//! One page about one run or several.

mod axis;
mod chart;
mod html;
mod page;
mod panels;
mod run;

pub use page::{REPORT_START, report_html};
pub use run::{Run, RunSample};
