//! Pages about runs, and model cards.

mod axis;
mod card;
mod chart;
mod html;
mod page;
mod panels;
mod rollouts;
mod run;

pub use card::{CARD_MARK, model_card};
pub use page::{REPORT_START, report_html};
pub use run::{Run, RunSample};
