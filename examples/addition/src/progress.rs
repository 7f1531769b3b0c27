//! A progress bar, or a few lines without a terminal.

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Bar {
    bar: ProgressBar,
    name: &'static str,
    /// Number of steps between lines.
    interval: u64,
}

impl Bar {
    /// Creates a bar for a known number of steps, with the remaining time.
    pub(crate) fn with_steps(name: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        Self::new(
            bar,
            name,
            "{prefix:8}{bar:40} {pos}/{len}  {msg}  {eta} left",
            steps as u64 / 10,
        )
    }

    /// Creates a bar for an unknown number of steps.
    pub(crate) fn open_ended(name: &'static str) -> Self {
        Self::new(
            ProgressBar::no_length(),
            name,
            "{prefix:8}step {pos}  {msg}  {elapsed}",
            100,
        )
    }

    fn new(bar: ProgressBar, name: &'static str, template: &str, interval: u64) -> Self {
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(name);
        Self {
            bar,
            name,
            interval: interval.max(1),
        }
    }

    /// Advances by one step.
    pub(crate) fn step(&self, message: &str) {
        self.bar.set_message(message.to_owned());
        self.bar.inc(1);
        let done = self.bar.position();
        if self.bar.is_hidden() && done.is_multiple_of(self.interval) {
            let left = match self.bar.length() {
                Some(all) => format!("/{all}, {}s left", self.bar.eta().as_secs()),
                None => String::new(),
            };
            println!("{:8}step {done}{left}  {message}", self.name);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.abandon();
    }
}
