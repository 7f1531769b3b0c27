//! Running time of this process.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which the process clock ticks.
const TICK: Duration = Duration::from_millis(100);

/// A longer interval means that the process was stopped, as by Ctrl-Z, a debugger or
/// `docker pause`, or that the machine was asleep.
const STILL: Duration = Duration::from_secs(1);

/// Measures time, except while the process was stopped.
///
/// Deadlines for programs and servers use it. On the machine's clock, all deadlines would have
/// passed when the process resumes, even if the answers have already arrived.
#[derive(Debug)]
struct Clock(Mutex<Reading>);

#[derive(Debug)]
struct Reading {
    at: Instant,
    time: Duration,
}

impl Clock {
    fn from(at: Instant) -> Self {
        let time = Duration::ZERO;
        Self(Mutex::new(Reading { at, time }))
    }

    /// Returns the time at `now`. Call this more than once a second.
    fn time_at(&self, now: Instant) -> Duration {
        let mut reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(reading.at);
        reading.time += if passed > STILL { TICK } else { passed };
        reading.at = reading.at.max(now);
        reading.time
    }
}

/// Returns how long this process has been running since the first call.
pub fn running_time() -> Duration {
    static CLOCK: LazyLock<Clock> = LazyLock::new(|| {
        // The thread ends with the process.
        thread::spawn(|| {
            loop {
                thread::sleep(TICK);
                running_time();
            }
        });
        Clock::from(Instant::now())
    });
    CLOCK.time_at(Instant::now())
}

/// A moment on both the machine's and the process's clock, for requests.
pub struct Beginning {
    at: Instant,
    time: Duration,
}

impl Beginning {
    /// Returns the current moment.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            time: running_time(),
        }
    }

    /// Returns whether this process was stopped since then.
    pub fn stood_still(&self) -> bool {
        let ran = running_time().saturating_sub(self.time);
        self.at.elapsed() > ran + STILL / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_process_stood_still_does_not_count() {
        let begin = Instant::now();
        let clock = Clock::from(begin);
        let mut now = begin;
        let mut after = |milliseconds| {
            now += Duration::from_millis(milliseconds);
            clock.time_at(now).as_millis()
        };
        assert_eq!(after(0), 0);
        assert_eq!(after(700), 700);
        assert_eq!(after(1000), 1700);
        // Stopped for an hour, twice.
        assert_eq!(after(3_600_000), 1800);
        assert_eq!(after(50), 1850);
        assert_eq!(after(6000), 1950);
        // A thread may have read the machine's time before another one.
        assert_eq!(clock.time_at(begin).as_millis(), 1950);
        assert_eq!(after(10), 1960);
    }

    #[test]
    fn the_clock_of_the_process_goes_on() {
        let first = running_time();
        while running_time() == first {
            thread::yield_now();
        }
    }
}
