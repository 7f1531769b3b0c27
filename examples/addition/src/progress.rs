//! A progress bar, or a few lines where there is no terminal to draw one on.

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Bar {
    bar: ProgressBar,
    name: &'static str,
    /// Steps between lines.
    interval: u64,
}

impl Bar {
    /// For a known number of steps: with the time left.
    pub(crate) fn of_steps(name: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        Self::new(
            bar,
            name,
            "{prefix:8}{bar:40} {pos}/{len}  {msg}  {eta} left",
            steps as u64 / 10,
        )
    }

    /// For as many steps as it takes.
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

    /// One more step is done.
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
