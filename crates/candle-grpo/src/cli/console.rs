//! Progress bars, the log, and requests to stop.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_grpo::train::Progress;
use candle_grpo::train::progress::Phase;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

const COMPLETIONS: &str = "{prefix:9} {bar:30} {pos}/{len} completions  {msg}  {eta} left";
const SEQUENCES: &str = "{prefix:9} {bar:30} {pos}/{len} sequences  {msg}  {eta} left";
const BYTES: &str =
    "{prefix:9} {bar:30} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";

/// Delay between checks for a stop request.
#[cfg(feature = "tinker")]
const STOP_CHECK: Duration = Duration::from_millis(50);

/// Progress bars on stderr below the log, and requests to stop.
#[derive(Clone)]
pub(super) struct Console {
    bars: MultiProgress,
    /// The step bar, hidden until [`Self::begin_steps`].
    steps: ProgressBar,
    phase: Arc<Mutex<PhaseBar>>,
    stop: Arc<AtomicBool>,
    /// Set once the stop message is printed.
    announced: Arc<AtomicBool>,
    /// True on rank 0, which prints the run's lines.
    is_first: bool,
}

struct PhaseBar {
    bar: ProgressBar,
    begun: Instant,
    tokens: usize,
}

impl Console {
    /// Starts to log to stderr: warnings, and events unless `quiet`. `RUST_LOG` overrides it.
    pub(super) fn new(quiet: bool) -> Self {
        Self::with_level(if quiet { "warn" } else { "info" })
    }

    /// Returns the console for a rank other than 0, which only prints errors.
    pub(super) fn of_other_rank() -> Self {
        Self {
            is_first: false,
            ..Self::with_level("error")
        }
    }

    fn with_level(level: &str) -> Self {
        let bars = MultiProgress::new();
        if level != "info" || !io::stderr().is_terminal() {
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let steps = bars.add(ProgressBar::hidden());
        let bar = bars.add(ProgressBar::hidden());
        let console = Self {
            bars,
            steps,
            phase: Arc::new(Mutex::new(PhaseBar {
                bar,
                begun: Instant::now(),
                tokens: 0,
            })),
            stop: Arc::new(AtomicBool::new(false)),
            announced: Arc::new(AtomicBool::new(false)),
            is_first: true,
        };
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
        // An earlier logger stays in use.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_target(false)
            .without_time()
            .with_ansi(io::stderr().is_terminal())
            .with_writer(console.clone())
            .try_init();
        console
    }

    /// Handles Ctrl-C, SIGTERM and SIGHUP as stop requests. A second Ctrl-C or SIGTERM ends the
    /// program at once with exit code 130.
    pub(super) fn stop_when_asked(&self) {
        for signal in stop_signals() {
            // A closed terminal may send SIGHUP twice: from the shell and from the system.
            let at_once = match signal {
                SIGINT | SIGTERM => {
                    register_conditional_shutdown(signal, 130, Arc::clone(&self.stop)).map(drop)
                }
                _ => Ok(()),
            };
            let registered = at_once.and_then(|()| register(signal, Arc::clone(&self.stop)));
            if let Err(error) = registered {
                tracing::warn!("signal {signal} will stop grpo at once: {error}");
            }
        }
    }

    /// Waits for a stop request, which [`Self::stop_when_asked`] handles.
    #[cfg(feature = "tinker")]
    pub(super) fn wait_for_stop(&self) {
        while !self.is_canceled() {
            std::thread::sleep(STOP_CHECK);
        }
    }

    /// Shows a bar for `steps` steps, with `done` already done.
    pub(super) fn begin_steps(&self, done: usize, steps: usize) {
        self.steps.set_length(steps as u64);
        self.steps.set_position(done as u64);
        self.steps.reset_eta();
        set_style(
            &self.steps,
            "{prefix:9} {bar:30} {pos}/{len}  {elapsed_precise}  {eta} left",
        );
        self.steps.set_prefix("step");
        self.bars.remove(&self.steps);
        self.bars.insert(0, self.steps.clone());
        self.steps.enable_steady_tick(Duration::from_secs(1));
    }

    /// Sets how many steps are done.
    pub(super) fn set_steps(&self, done: usize) {
        self.steps.set_position(done as u64);
    }

    /// Prints a line to stdout, above the bars.
    pub(super) fn print(&self, line: &str) -> io::Result<()> {
        self.bars.suspend(|| {
            let mut out = io::stdout().lock();
            writeln!(out, "{line}")?;
            out.flush()
        })
    }

    /// Prints one of the run's lines. A closed stdout does not end the run.
    pub(super) fn say(&self, line: &str) {
        if self.is_first {
            let _ = self.print(line);
        }
    }

    fn print_err(&self, line: &str) {
        // A closed stderr does not end the run.
        let _ = self.bars.suspend(|| writeln!(io::stderr(), "{line}"));
    }

    /// Removes the bars.
    pub(super) fn finish(&self) {
        self.steps.finish_and_clear();
        self.phase().bar.finish_and_clear();
    }

    fn phase(&self) -> std::sync::MutexGuard<'_, PhaseBar> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for Console {
    fn begin(&self, phase: Phase, units: usize) {
        let mut shown = self.phase();
        self.bars.remove(&shown.bar);
        let bar = self.bars.add(ProgressBar::new(units as u64));
        let (name, template) = match phase {
            Phase::Sample => ("sampling", COMPLETIONS),
            Phase::Score => ("scoring", COMPLETIONS),
            Phase::Learn => ("training", SEQUENCES),
            Phase::HeldOutLoss => ("held out", SEQUENCES),
            Phase::Evaluate => ("answering", COMPLETIONS),
            Phase::Save => ("saving", "{prefix:9} {spinner}"),
            Phase::Download => ("download", BYTES),
            Phase::Upload => ("upload", BYTES),
        };
        set_style(&bar, template);
        bar.set_prefix(name);
        bar.tick();
        *shown = PhaseBar {
            bar,
            begun: Instant::now(),
            tokens: 0,
        };
    }

    fn advance(&self, units: usize, tokens: usize) {
        let mut shown = self.phase();
        shown.tokens += tokens;
        if shown.tokens > 0 {
            let rate = shown.tokens as f64 / shown.begun.elapsed().as_secs_f64();
            shown.bar.set_message(format!("{rate:.0} tokens/s"));
        }
        shown.bar.inc(units as u64);
    }

    fn is_canceled(&self) -> bool {
        let stop = self.stop.load(Ordering::SeqCst);
        if stop && self.is_first && !self.announced.swap(true, Ordering::SeqCst) {
            self.print_err("stopping; press Ctrl-C again to stop without saving");
        }
        stop
    }
}

/// Returns the signals that request a stop. SIGHUP is one, unless it is ignored (`nohup`).
#[cfg(unix)]
fn stop_signals() -> Vec<i32> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    use signal_hook::consts::SIGHUP;

    let mut signals = vec![SIGINT, SIGTERM];
    // SAFETY: the default and ignored dispositions run no code of this program.
    #[expect(unsafe_code, reason = "there is no other way to read a disposition")]
    let before = unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl) };
    match before {
        Ok(SigHandler::SigIgn) => {
            // SAFETY: as above.
            #[expect(unsafe_code, reason = "the signal stays ignored")]
            let _ = unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
        }
        _ => signals.push(SIGHUP),
    }
    signals
}

#[cfg(not(unix))]
fn stop_signals() -> Vec<i32> {
    vec![SIGINT, SIGTERM]
}

fn set_style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

/// A log line above the bars.
pub(super) struct LogLine<'a> {
    console: &'a Console,
    line: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Console {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> LogLine<'a> {
        LogLine {
            console: self,
            line: Vec::new(),
        }
    }
}

impl Write for LogLine<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogLine<'_> {
    fn drop(&mut self) {
        let line = String::from_utf8_lossy(&self.line);
        self.console.print_err(line.trim_end_matches('\n'));
    }
}
