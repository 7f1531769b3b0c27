//! A progress bar, or a few lines where there is no terminal to draw one on.

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Bar {
    bar: ProgressBar,
    name: &'static str,
}

impl Bar {
    pub(crate) fn new(name: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        let template = "{prefix:7} {bar:40} {pos}/{len}  {msg}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(name);
        Self { bar, name }
    }

    /// One more step is done.
    pub(crate) fn step(&self, message: &str) {
        self.bar.inc(1);
        self.bar.set_message(message.to_owned());
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        if self.bar.is_hidden() && (done.is_multiple_of((all / 10).max(1)) || done == all) {
            let left = self.bar.eta().as_secs();
            println!("{:7} {done}/{all}  {message}  {left}s left", self.name);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.abandon();
    }
}
